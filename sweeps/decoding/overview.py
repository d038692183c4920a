"""Overviews of sweeps over decoding choices, read from their folders.

`sweeps.reports.overview` does the same for sweeps of trainings. Uses neither Ray nor plots.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.reports.wording import duration
from moray.errors import DataError
from moray.provenance import RUN_FILE, read_json, read_run_yaml
from sweeps.decoding.results import PLAN_FILE, ranked, read_shapes
from sweeps.decoding.summaries import (
    BestRow,
    DecodingOverview,
    DecodingSummary,
    DrafterAnswer,
    DrafterOverview,
    FinalistRow,
    PlanFile,
)
from sweeps.reports.overview import LEGEND, how_far, leader_of, named, sure_cell
from sweeps.reports.results import NO_LEAD, Trial, lead_of
from sweeps.reports.summaries import HowFar
from sweeps.tuning.folders import ENDED
from sweeps.tuning.resume import SUMMARY_FILE, is_worked_on, seconds_run

_KEYS = {"drafters", "space", "search", "objective", "ladder"}
_OF_TRAININGS = {"distill", "distil"}
"""A key that only a sweep over trainings has, and its name in earlier versions."""


def is_decoding(folder: str) -> bool:
    """Whether a folder holds a sweep over decoding choices, finished or not.

    Raises:
        DataError: the folder's run.yaml is damaged.
    """
    path = Path(folder)
    return (path / RUN_FILE).is_file() and _is_decoding(read_run_yaml(path).get("config"))


def _is_decoding(config: Any) -> bool:
    return isinstance(config, dict) and config.keys() >= _KEYS and config.keys().isdisjoint(_OF_TRAININGS)


def decoding_overview(folder: str) -> DecodingOverview:
    """Results or progress of a sweep over decoding choices, per drafter; see `is_decoding`.

    Raises:
        DataError: the folder is damaged.
    """
    path = Path(folder)
    config = read_run_yaml(path)["config"]
    summary: DecodingSummary | None = read_json(path / SUMMARY_FILE) if (path / SUMMARY_FILE).is_file() else None
    plan: PlanFile | None = read_json(path / PLAN_FILE) if (path / PLAN_FILE).is_file() else None
    trials = _trials(folder)
    names = [Path(drafter).name for drafter in config["drafters"]]
    rungs = (len(plan["questions"]) if plan else 0) or config["ladder"]["rungs"]
    planned, worked_on = plan["trials"] if plan else {}, is_worked_on(path)
    answers = summary["drafters"] if summary else {}
    return {
        "sweep": folder,
        "objective": config["objective"],
        "complete": summary is not None,
        "drafters": {
            name: _of_drafter(
                answers.get(name),
                _progress(
                    [trial for trial in trials if trial.choices["drafter"] == name],
                    planned.get(name, config["search"].get("num_trials")),
                    rungs,
                    worked_on,
                ),
            )
            for name in names
        },
        "between": summary["between"] if summary else None,
        "left_out": summary["left_out"] if summary else None,
        "num_trials": len(trials),
        "wall_seconds": seconds_run(path) or None,
    }


def _trials(folder: str) -> list[Trial]:
    try:
        return read_shapes(folder)
    except (KeyError, TypeError, ValueError):
        raise DataError(f"'{folder}' holds a trial that no sweep over decoding choices has left there") from None


def _of_drafter(answer: DrafterAnswer | None, progress: HowFar) -> DrafterOverview:
    """A drafter's winner, its runner-up and how certain the lead is; all None if there is no answer yet."""
    if answer is None:
        return {"winner": None, "runner_up": None, "evaluate": None, "sure": NO_LEAD, "progress": progress}
    first, *others = map(_best_row, answer["finalists"])
    return {
        "winner": first,
        "runner_up": others[0] if others else None,
        "evaluate": answer["evaluate"],
        "sure": lead_of(answer),
        "progress": progress,
    }


def _best_row(row: FinalistRow) -> BestRow:
    return {
        "name": row["name"],
        "choices": row["choices"],
        "objective": row["objective"],
        "spread": row["spread"],
    }


def _progress(trials: Sequence[Trial], planned: int | None, rungs: int, worked_on: bool) -> HowFar:
    """A drafter's number of planned trials, the states of those that have begun, and the leader."""
    best = next((trial for trial in ranked(trials) if trial.rows), None)
    return {
        "planned": planned,
        "begun": len(trials),
        "ended": sum(trial.state in ENDED for trial in trials),
        "states": dict(Counter(trial.state for trial in trials)),
        "rungs": rungs,
        "worked_on": worked_on,
        "leader": leader_of(best) if best else None,
    }


def print_decoding_overviews(overviews: Sequence[DecodingOverview], console: Console) -> None:
    """Print a table of the drafters of all sweeps, then the progress of unfinished sweeps."""
    table = Table(title="Sweeps over decoding", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = LEGEND, "left"
    for column in ("sweep", "winner, runner-up (95 % interval)"):
        table.add_column(column, overflow="fold")
    table.add_column("objective", no_wrap=True)
    for column in ("sure", "trials", "h:mm:ss"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in overviews:
        for index, (name, one) in enumerate(found["drafters"].items()):
            table.add_row(
                Text("" if index else found["sweep"]), Text(_best_two(name, one, found["complete"])),
                found["objective"], sure_cell(one["sure"]), str(one["progress"]["begun"]),
                "" if index else duration(found["wall_seconds"]),
            )  # fmt: skip
    console.print(table)
    for found in overviews:
        if not found["complete"]:
            for name, one in found["drafters"].items():
                title = f"{found['sweep']}, {name}"
                console.print(how_far(title, found["objective"], one["progress"]), markup=False, highlight=False)


def _best_two(name: str, one: DrafterOverview, is_complete: bool) -> str:
    rows = [row for row in (one["winner"], one["runner_up"]) if row]
    if not rows:
        return f"{name}: {'no trial came to its end' if is_complete else 'not finished'}"
    return "\n".join(named(row["name"], row["objective"], row["spread"]) for row in rows)
