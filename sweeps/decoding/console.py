"""Prints the summary of a sweep over decoding choices in the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.reports.wording import number
from sweeps.decoding.summaries import DecodingSummary, DrafterAnswer
from sweeps.reports.summaries import TrialSummary
from sweeps.tuning.records import Figures, LastFigures

_COLUMNS = ("speed-up", "tau", "tok/s", "draft", "verify")
"""The last two are the costs of a draft step and of verifying a tree, in units of a plain step."""


def print_decoding(summary: DecodingSummary, console: Console) -> None:
    """Print each drafter's trials, best first, its finalists, and the winner."""
    for drafter in {trial["choices"]["drafter"]: None for trial in summary["trials"]}:
        trials = [trial for trial in summary["trials"] if trial["choices"]["drafter"] == drafter]
        _print_trials(f"{drafter}: search", trials, console)
        answer = summary["drafters"].get(drafter)
        if answer is not None:
            _print_answer(drafter, answer, summary, console)
    between = summary["between"]
    if between is not None:
        is_sure = between["ahead_interval"] is not None and between["ahead_interval"][0] > 0
        chance = "" if is_sure else ": they cannot be told apart by these measurements"
        console.print(
            f"{between['best']} is ahead of {between['second']}, each at its best, in {between['stays_ahead']:.0%} of "
            f"resamples of prompts{chance}", markup=False, highlight=False,
        )  # fmt: skip
    console.print(f"{summary['wall_seconds']:.0f} s", highlight=False)


def _print_trials(title: str, trials: list[TrialSummary], console: Console) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("way to decode", overflow="fold")
    for column in ("state", "questions", *_COLUMNS):
        table.add_column(column, justify="right")
    by_rung = sorted(
        trials, key=lambda one: (-one["figures"].get("rung", -1), -(one["figures"].get("objective") or 0.0))
    )
    for trial in by_rung:
        figures = trial["figures"]
        table.add_row(
            _short(trial["name"]), trial["state"], str(figures.get("rung_questions", "")), *_cells(figures),
        )  # fmt: skip
    console.print(table)
    for trial in trials:
        if trial["message"]:
            console.print(f"{trial['name']}: {trial['state']}: {trial['message']}", markup=False, highlight=False)


def _print_answer(drafter: str, answer: DrafterAnswer, summary: DecodingSummary, console: Console) -> None:
    table = Table(title=f"{drafter}: side by side", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("way to decode", overflow="fold")
    for column in (f"{summary['objective']}, 95 %", *_COLUMNS):
        table.add_column(column, justify="right")
    for row in answer["finalists"]:
        low, high = row["spread"] or (None, None)
        table.add_row(
            _short(row["name"]), f"{number(low, 3)}-{number(high, 3)}", *_cells(row["figures"]),
        )  # fmt: skip
    console.print(table)
    sure = "" if answer["stays_ahead"] is None else f", ahead in {answer['stays_ahead']:.0%} of resamples of prompts"
    if answer["ahead_interval"] and answer["ahead_interval"][0] <= 0:
        sure += " (cannot be told from the next by these measurements)"
    console.print(
        f"winner: {answer['name']}: {summary['objective']} {answer['objective']:.2f}{sure}; {answer['evaluate']}",
        markup=False, highlight=False,
    )  # fmt: skip


def _short(name: str) -> str:
    """The name of a combination without its drafter, which the title already names."""
    return name.partition(", ")[2]


def _cells(figures: Figures | LastFigures) -> list[str]:
    return [
        number(figures.get("speedup"), 3), number(figures.get("tau"), 3), number(figures.get("tokens_per_second"), 3),
        number(figures.get("draft_cost"), 2), number(figures.get("verify_cost"), 3),
    ]  # fmt: skip
