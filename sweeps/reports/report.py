"""Writes the results of a sweep of trainings: summary.json and sweep.parquet for programs, report.html for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moray.bench.reports.page import render_page
from moray.bench.reports.wording import number, percent
from moray.config import flatten
from moray.provenance import write_json_atomically, write_text_atomically
from sweeps.reports.results import Trial
from sweeps.reports.summaries import Lead, Summary
from sweeps.reports.views import WORDS, common_rung, read_space, searched, tokens_at, worths

_FEW_SEEDS = 5
_COLUMNS = (
    ("trained", "share of the training that leads to the highest rung; trials with less are not comparable"),
    ("tau", "tokens emitted per pass of the target, the target's own (bonus) token included"),
    ("speed-up", "over our own decoding loop without a drafter, on the same prompts; below 1 is a loss"),
    ("draft cost", "time of one draft step over the time of one plain step of the target"),
    ("verify cost", "time of verifying the tree over the time of one plain step of the target"),
    ("lossless", "whether the output was the one of plain decoding, token by token; NO means a defect"),
    (
        "state",
        "finished on the last rung; stopped early, because others were better or for the reason listed below; diverged "
        "or failed, as listed below",
    ),
)


def write_sweep(summary: Summary, trials: list[Trial], output: Path) -> None:
    """Write all files; summary.json comes last, because it marks the sweep as complete."""
    write_text_atomically(output / "report.html", render_html(summary, trials))
    write_tables(summary, trials, output)


def write_tables(summary: Mapping[str, Any], trials: list[Trial], output: Path) -> None:
    """Write sweep.parquet, then summary.json."""
    import pandas as pd

    rows = [
        {"trial": trial.folder.name, "name": trial.name, "state": trial.state, **_cells(trial.choices), **_cells(row)}
        for trial in trials
        for row in trial.rows
    ]
    path = output / "sweep.parquet"
    pd.DataFrame(rows).to_parquet(path.with_suffix(".tmp"), index=False)
    path.with_suffix(".tmp").replace(path)
    write_json_atomically(output / "summary.json", summary)


def render_html(summary: Summary, trials: list[Trial]) -> str:
    """Render the page: one file that needs no network, no script and no other file."""
    from sweeps.reports.plots import draw_plots

    search = searched(trials, read_space(summary["config"]["space"]), summary["objective"])
    rung = common_rung(search)
    return render_page(
        "sweeps.reports",
        "report.html.jinja",
        summary=summary,
        has_break_even=any("break_even_tau" in trial.last for trial in trials),
        objective=WORDS[summary["objective"]],
        sure=how_sure_in_words(summary),
        speedup_spread="middle half of rounds" if is_batched(summary) else "95 %",
        finalists=summary["sure"]["finalists"],
        ranks=summary["ranks"],
        stopped=sum(bool(trial.rows) and not search.is_whole(trial) for trial in search.trials),
        plots=draw_plots(search, summary["ranks"]),
        worths=worths(search, rung),
        worth_tokens=tokens_at(search, rung),
        trials=[*search.ranked, *(trial for trial in trials if trial not in search.trials or not trial.rows)],
        shares={trial.folder: search.share(trial) for trial in trials},
        columns=_COLUMNS,
        machine=setting_rows(summary["machine"]),
        versions=setting_rows(summary["versions"]),
        config=setting_rows(summary["config"]),
    )


def is_batched(summary: Summary) -> bool:
    """Whether several sequences were decoded together, in which case figures are per round over all prompts."""
    return summary["config"].get("decoding", {}).get("batch_size", 1) > 1


def how_sure_in_words(summary: Summary) -> list[str]:
    """Sentences about how certain the winner's lead is."""
    sure, word = summary["sure"], WORDS[summary["objective"]]
    drawn = "rounds" if is_batched(summary) else "prompts"
    first, *others = sure["finalists"]
    if not others or sure["ahead_interval"] is None:
        return ["Only one combination was trained to the end and measured again: there is none to compare it with."]
    span = "resamples of so few rounds span" if is_batched(summary) else "95 % interval"
    found = lead_in_words(first["name"], others[0]["name"], sure, word, f"{drawn} and seeds", span)
    seeds = min(len(finalist["seeds"]) for finalist in (first, others[0]))
    if seeds == 1:
        found.append("With one training of each, the interval knows nothing of how trainings from other seeds differ.")
    elif seeds < _FEW_SEEDS:
        found.append(f"With {seeds} trainings of each, the interval is rather too narrow than too wide.")
    return found


def lead_in_words(first: str, second: str, sure: Lead, word: str, drawn: str, span: str = "95 % interval") -> list[str]:
    """Sentences about how far one is ahead of another, and whether that may be chance.

    Args:
        first: name of the one ahead.
        second: name of the one behind.
        sure: the lead of the one ahead, which is known.
        word: the objective in words.
        drawn: what was resampled.
        span: what the bounds of `ahead_interval` are.
    """
    assert sure["ahead_by"] is not None
    assert sure["ahead_interval"] is not None
    low, high = sure["ahead_interval"]
    gap = (
        f"{first} is ahead of {second} by {number(sure['ahead_by'])} in {word} ({span} {number(low)} to "
        f"{number(high)}), and stays ahead in {percent(sure['stays_ahead'])} of resamples of {drawn}."
    )
    return [gap] if low > 0 else ["The two best cannot be told apart by these measurements.", gap]


def _cells(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: str(v) if isinstance(v, list | dict) else v for key, v in values.items() if key != "answers"}


def setting_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Flatten nested settings to pairs of (dotted key, text)."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in flatten(values).items()
    ]
