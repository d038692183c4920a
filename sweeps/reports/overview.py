"""Overviews of sweeps of trainings, read from their folders. Uses neither Ray nor plots."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.reports.wording import count, duration, interval, number, percent
from moray.errors import DataError
from moray.explain import nearest_path
from moray.provenance import RUN_FILE, read_json, read_run_yaml
from moray.renamed import with_current_names
from sweeps.reports.results import Trial, read_trials
from sweeps.reports.views import Searched, common_rung, read_space, searched, tokens_at, worths
from sweeps.trainings.configs import SweepConfig
from sweeps.tuning.folders import ENDED
from sweeps.tuning.resume import SUMMARY_FILE, is_worked_on, seconds_run
from sweeps.tuning.spaces import Space, size

LEGEND = "sure: how often the winner stays ahead of the next when prompts and seeds are drawn again; ?: may be chance"
"""Explains the columns that are not self-explanatory."""


def overview(folder: str) -> dict[str, Any]:
    """Results or progress of a sweep of trainings.

    Raises:
        DataError: the folder holds no sweep, or a damaged one.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"'{folder}' is no folder{nearest_path(path)}")
    config = _config(path)
    try:
        space = read_space(config["space"])
    except ValidationError:
        raise DataError(f"'{path / RUN_FILE}' has a space that cannot be read") from None
    trials = read_trials(folder)
    search = searched(trials, space, config["objective"])
    summary = read_json(path / SUMMARY_FILE) if (path / SUMMARY_FILE).is_file() else None
    sure = summary["sure"] if summary else {}
    rung = common_rung(search)
    return {
        "sweep": folder,
        "objective": search.objective,
        "complete": summary is not None,
        "winner": summary["winner"] if summary else None,
        "runner_up": _runner_up(sure),
        "sure": {key: sure.get(key) for key in ("ahead_by", "ahead_interval", "stays_ahead")},
        "progress": _progress(search, config, is_worked_on(path)),
        "num_trials": len(trials),
        "training_tokens": sum(trial.training_tokens for trial in trials),
        "wall_seconds": seconds_run(path) or None,
        "worth_rung": rung,
        "worth_tokens": tokens_at(search, rung),
        "worths": [dataclasses.asdict(worth) for worth in worths(search, rung)],
    }


def _config(path: Path) -> dict[str, Any]:
    """The sweep's configuration, as of its start or last resumption."""
    if (path / RUN_FILE).is_file():
        config = read_run_yaml(path).get("config")
        config = with_current_names(SweepConfig, config, notice=False) if isinstance(config, dict) else {}
        if {"distill", "space", "objective", "ladder"} <= config.keys():
            return config
    raise DataError(
        f"'{path}' holds no sweep: give the output of a `python -m sweeps.tune` or `python -m sweeps.tune_decoding`"
    )


def _runner_up(sure: dict[str, Any]) -> dict[str, Any] | None:
    finalists = sure.get("finalists", [])
    return {key: finalists[1][key] for key in ("name", "choices", "mean", "spread")} if len(finalists) > 1 else None


def _progress(search: Searched, config: dict[str, Any], worked_on: bool) -> dict[str, Any]:
    """The number of planned trials, the states of those that have begun, and the leader."""
    best = search.ranked[:1]
    return {
        "planned": _planned(search.space, config["search"]),
        "begun": len(search.trials),
        "ended": sum(trial.state in ENDED for trial in search.trials),
        "states": dict(Counter(trial.state for trial in search.trials)),
        "rungs": config["ladder"]["rungs"],
        "worked_on": worked_on,
        "leader": _leader(best[0]) if best else None,
    }


def _planned(space: Space, search: dict[str, Any]) -> int | None:
    return search.get("num_trials") or size(space)


def _leader(trial: Trial) -> dict[str, Any]:
    return {"name": trial.name, "rung": trial.last["rung"], "objective": trial.last["objective"]}


def print_overviews(overviews: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a table of the sweeps, the progress of unfinished ones, then per sweep the objective by value."""
    console.print(_side_by_side(overviews))
    for found in overviews:
        if not found["complete"]:
            text = how_far(found["sweep"], found["objective"], found["progress"])
            console.print(text, markup=False, highlight=False)
    for found in overviews:
        if found["worths"]:
            title = f"{found['sweep']}: {found['objective']} by value, at {found['worth_tokens']:,.0f} training tokens"
            console.print(title, style="italic", markup=False, highlight=False)
            console.print(_worth_table(found))


def _side_by_side(overviews: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Sweeps", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = LEGEND, "left"
    table.add_column("sweep", overflow="fold")
    table.add_column("winner, runner-up", overflow="fold")
    table.add_column("objective", no_wrap=True)
    for column in ("sure", "trials", "tokens", "h:mm:ss"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in overviews:
        winner, second = found["winner"], found["runner_up"]
        names = [named(winner["name"], winner["objective"], winner["spread"])] if winner else ["not finished"]
        names += [named(second["name"], second["mean"], second["spread"])] if second else []
        table.add_row(
            Text(found["sweep"]), Text("\n".join(names)), found["objective"], sure_cell(found["sure"]),
            str(found["num_trials"]), count(found["training_tokens"]), duration(found["wall_seconds"]),
        )  # fmt: skip
    return table


def named(name: str, value: float, spread: Sequence[float] | None) -> str:
    """Format a trial's name with its objective and, if known, its interval."""
    return f"{name}: {number(value)}" + (f" ({interval(spread)})" if spread else "")


def sure_cell(sure: dict[str, Any]) -> str:
    """Share of resamples in which the winner stays ahead; `?` if the 95 % interval of its lead contains 0."""
    if sure["stays_ahead"] is None:
        return "-"
    return f"{percent(sure['stays_ahead'])}{'' if sure['ahead_interval'][0] > 0 else ' ?'}"


def how_far(name: str, objective: str, progress: Mapping[str, Any]) -> str:
    """Describe the progress of an unfinished sweep, or of a part of one."""
    words = {} if progress["worked_on"] else {"running": "interrupted"}
    ended, others = [], []
    for state, count_of in progress["states"].items():
        (ended if state in ENDED else others).append(f"{count_of} {words.get(state, state)}")
    text = f"{name}: not finished: {progress['ended']} of {progress['planned'] or '?'} trials have ended"
    text += (f" ({', '.join(ended)})" if ended else "") + "".join(f", {other}" for other in others)
    leader = progress["leader"]
    if leader is None:
        return text
    return (
        f"{text}; ahead on rung {leader['rung'] + 1} of {progress['rungs']}: {leader['name']}: {objective} "
        f"{number(leader['objective'])}"
    )


def _worth_table(found: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("key", overflow="fold")
    table.add_column("value", overflow="fold")
    for column in ("trials", "mean", "best"):
        table.add_column(column, justify="right")
    previous = None
    for worth in found["worths"]:
        key = "" if worth["key"] == previous else worth["key"]
        if key and previous is not None:
            table.add_section()
        previous = worth["key"]
        cells = [number(worth["mean"]), number(worth["best"])]
        table.add_row(Text(key), Text(worth["value"]), str(worth["trials"]), *cells)
    return table
