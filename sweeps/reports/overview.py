"""Overviews of sweeps of trainings, read from their folders. Uses neither Ray nor plots."""

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
from sweeps.reports.results import NO_LEAD, Trial, lead_of, read_trials
from sweeps.reports.summaries import HowFar, HowSure, Lead, Leader, Overview, RunnerUp, Summary, WorthRow
from sweeps.reports.views import SearchTrials, Worth, common_rung, read_space, searched, tokens_at, worths
from sweeps.tuning.folders import ENDED
from sweeps.tuning.resume import SUMMARY_FILE, is_worked_on, seconds_run
from sweeps.tuning.spaces import Space, size

LEGEND = "sure: how often the winner stays ahead of the next when prompts and seeds are drawn again; ?: may be chance"
"""Explains the columns that are not self-explanatory."""

_KEYS = {"distill", "space", "objective", "ladder"}
"""What the configuration of a sweep over trainings has, among others."""
_OLD_KEY = "distil"
"""The name of `distill` before version 0.2."""


def overview(folder: str) -> Overview:
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
    summary: Summary | None = read_json(path / SUMMARY_FILE) if (path / SUMMARY_FILE).is_file() else None
    rung = common_rung(search)
    return {
        "sweep": folder,
        "objective": search.objective,
        "complete": summary is not None,
        "winner": summary["winner"] if summary else None,
        "runner_up": _runner_up(summary["sure"]) if summary else None,
        "sure": lead_of(summary["sure"]) if summary else NO_LEAD,
        "progress": _progress(search, config, is_worked_on(path)),
        "num_trials": len(trials),
        "training_tokens": sum(trial.training_tokens for trial in trials),
        "wall_seconds": seconds_run(path) or None,
        "worth_rung": rung,
        "worth_tokens": tokens_at(search, rung),
        "worths": [_row_of(worth) for worth in worths(search, rung)],
    }


def _config(path: Path) -> dict[str, Any]:
    """The sweep's configuration, as of its start or last resumption."""
    if (path / RUN_FILE).is_file():
        config = read_run_yaml(path).get("config")
        if isinstance(config, dict) and {"distill" if key == _OLD_KEY else key for key in config} >= _KEYS:
            return config
    raise DataError(
        f"'{path}' holds no sweep: give the output of a `python -m sweeps.tune` or `python -m sweeps.tune_decoding`; "
        "a sweep over sparse targets has its report in its own folder"
    )


def _runner_up(sure: HowSure) -> RunnerUp | None:
    if len(sure["finalists"]) < 2:
        return None
    second = sure["finalists"][1]
    return {
        "name": second["name"],
        "choices": second["choices"],
        "mean": second["mean"],
        "spread": second["spread"],
    }


def _row_of(worth: Worth) -> WorthRow:
    return {
        "key": worth.key,
        "value": worth.value,
        "trials": worth.trials,
        "mean": worth.mean,
        "best": worth.best,
    }


def _progress(search: SearchTrials, config: Mapping[str, Any], worked_on: bool) -> HowFar:
    """The number of planned trials, the states of those that have begun, and the leader."""
    best = search.ranked[:1]
    return {
        "planned": _planned(search.space, config["search"]),
        "begun": len(search.trials),
        "ended": sum(trial.state in ENDED for trial in search.trials),
        "states": dict(Counter(trial.state for trial in search.trials)),
        "rungs": config["ladder"]["rungs"],
        "worked_on": worked_on,
        "leader": leader_of(best[0]) if best else None,
    }


def _planned(space: Space, search: Mapping[str, Any]) -> int | None:
    return search.get("num_trials") or size(space)


def leader_of(trial: Trial) -> Leader:
    """The trial as the leader of a search; it has been measured."""
    last = trial.rows[-1]
    return {"name": trial.name, "rung": last["rung"], "objective": last["objective"]}


def print_overviews(overviews: Sequence[Overview], console: Console) -> None:
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


def _side_by_side(overviews: Sequence[Overview]) -> Table:
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


def sure_cell(sure: Lead) -> str:
    """Share of resamples in which the winner stays ahead; `?` if the 95 % interval of its lead contains 0."""
    if sure["stays_ahead"] is None or sure["ahead_interval"] is None:
        return "-"
    return f"{percent(sure['stays_ahead'])}{'' if sure['ahead_interval'][0] > 0 else ' ?'}"


def how_far(name: str, objective: str, progress: HowFar) -> str:
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


def _worth_table(found: Overview) -> Table:
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
