"""Prints the summary of a sweep of trainings in the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.reports.wording import number
from sweeps.reports.summaries import Summary


def print_summary(summary: Summary, console: Console) -> None:
    """Print the trials, best first, and the winner."""
    table = Table(
        title="Trials, as measured in the search beside others",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    table.add_column("trial", overflow="fold")
    has_break_even = any("break_even_tau" in trial["figures"] for trial in summary["trials"])
    extra = ("tau to break even",) if has_break_even else ()
    for column in ("state", "tokens", "tau", *extra, "speed-up", "tok/s", "draft cost", "loss"):
        table.add_column(column, justify="right")
    trials = sorted(
        summary["trials"],
        key=lambda trial: (-trial["figures"].get("rung_tokens", 0), -trial["figures"].get("objective", 0)),
    )
    for trial in trials:
        figures = trial["figures"]
        keys = ("tau", "break_even_tau", "speedup") if has_break_even else ("tau", "speedup")
        cells = [number(figures.get(key), 3) for key in keys]
        table.add_row(
            trial["name"], trial["state"], f"{trial['training_tokens']:,}", *cells,
            number(figures.get("tokens_per_second"), 0), number(figures.get("draft_cost"), 3),
            number(figures.get("loss"), 3),
        )  # fmt: skip
    console.print(table)
    for trial in trials:
        if trial["message"]:
            console.print(f"{trial['name']}: {trial['state']}: {trial['message']}", markup=False, highlight=False)
    winner, sure = summary["winner"], summary["sure"]
    low, high = winner["spread"]
    seeds = len(sure["finalists"][0]["seeds"])
    console.print(
        f"winner: {winner['name']}: {summary['objective']} {winner['objective']:.2f} ({low:.2f} to {high:.2f} over "
        f"{seeds} seeds)", markup=False, highlight=False,
    )  # fmt: skip
    if sure["stays_ahead"] is not None:
        second = sure["finalists"][1]
        console.print(
            f"ahead of {second['name']} ({second['mean']:.2f}) in {sure['stays_ahead']:.0%} of resamples of prompts "
            "and seeds", markup=False, highlight=False,
        )  # fmt: skip
        if sure["ahead_interval"] is not None and sure["ahead_interval"][0] <= 0:
            console.print("these two cannot be told apart by these measurements", highlight=False)
    console.print(
        f"{summary['training_tokens']:,} training tokens, {summary['wall_seconds']:.0f} s; the best drafter, for "
        f"pipelines.evaluate's drafters=[...]: {winner['folder']}",
        markup=False, highlight=False,
    )  # fmt: skip
