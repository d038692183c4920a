"""Runs a sweep of trainings: check, search, confirm the winner, report. Requires a Ray session."""

import shutil
import statistics
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from moray.cluster.training.resume import run_fingerprints
from moray.errors import DataError
from moray.progress import Progress
from moray.provenance import (
    RUN_FILE,
    machine,
    read_json,
    sha256_of_files,
    versions,
    write_json_atomically,
    write_text_atomically,
)
from sweeps.reports.report import write_sweep
from sweeps.reports.results import Finalist, Trial, best_trials, first_message, how_sure, rank_agreement, read_trials
from sweeps.reports.summaries import Summary
from sweeps.reports.views import searched
from sweeps.trainings.break_even import store_break_even
from sweeps.trainings.check import check_sweep, concurrency
from sweeps.trainings.configs import DecodingConfig, SweepConfig
from sweeps.trainings.ladder import Rung
from sweeps.trainings.measure import folder_key
from sweeps.trainings.search import listed_points, search, train_all
from sweeps.trainings.trial import decoding_gpus, measure_on_ray
from sweeps.tuning.configs import GridSearch, OptunaSearch
from sweeps.tuning.folders import trial_folder, trial_folders
from sweeps.tuning.progress import SweepProgressActor, follow_sweep
from sweeps.tuning.records import MeasuredFigures
from sweeps.tuning.resume import (
    SUMMARY_FILE,
    alone,
    begin_or_resume_sweep,
    check_same_trainings,
    check_sweep_folder,
    is_done,
    running_clock,
    seconds_run,
)
from sweeps.tuning.spaces import Choices, lies_in, size

_FINAL_FILE = "final.json"
_DISTILL_FILE, _OLD_DISTILL_FILE = "distill.yaml", "distil.yaml"
"""File with the resolved configuration that all trials share, and its name before version 0.2."""
_SEED = "train.seed"


def run_sweep(sweep: SweepConfig, console: Console) -> Summary:
    """Run or resume a sweep; returns the contents of summary.json.

    Raises:
        ConfigError, DataError, MismatchError: a check failed; nothing has been started.
        DataError: no trial was trained to the end.
    """
    output = Path(sweep.output).absolute()
    rungs = check_sweep(sweep)
    concurrent = concurrency(sweep, sweep.trial({}))
    progress_actor: Any = SweepProgressActor.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    total = (size(sweep.space) if isinstance(sweep.search, GridSearch) else sweep.search.num_trials) or 0
    with alone(output):
        _check_folder(sweep, output)
        begin_or_resume_sweep(output, _recorded(sweep), _fingerprints(sweep))
        with running_clock(output):
            shipped = _shipped(sweep, output)
            console.print(
                f"{total} trials, {concurrent} at a time; measured at "
                f"{', '.join(f'{rung.tokens:,.0f}' for rung in rungs)} training tokens",
                highlight=False,
            )
            _store_break_even(shipped, console)
            others = sum(not lies_in(one.record["choices"], sweep.space) for one in trial_folders(sweep.output))
            with follow_sweep(progress_actor, sweep.output, total + others, sweep.objective):
                search(shipped, rungs, progress_actor, concurrent)
            trials = read_trials(sweep.output)
            found = searched(trials, sweep.space, sweep.objective).trials
            finalists = best_trials(found, sweep.confirm.finalists)
            if not finalists:
                raise DataError(f"not one trial of '{output}' was trained to the end{first_message(trials)}")
            confirmed = _confirm(shipped, finalists, rungs[-1], progress_actor, concurrent, console)
            _crown(sweep, confirmed, output)
        return _write(sweep, read_trials(sweep.output), confirmed, output)


def is_complete(sweep: SweepConfig) -> bool:
    """Whether the sweep is done. An unfinished sweep is refused unless `resume` is set.

    Raises:
        MismatchError: the folder holds another sweep.
        ConfigError: the folder holds an unfinished sweep, and `resume` is not set.
    """
    output = Path(sweep.output)
    _check_folder(sweep, output)
    return is_done(output, _recorded(sweep), lambda: _fingerprints(sweep), sweep.resume)


def summary_path(sweep: SweepConfig) -> Path:
    """Path of the summary of a complete sweep."""
    return Path(sweep.output).absolute() / SUMMARY_FILE


def _store_break_even(sweep: SweepConfig, console: Console) -> None:
    """Measure at which tau the drafts of each trial would pay, if the sweep stops trials by it."""
    if sweep.stop_below_break_even is None:
        return
    assert not isinstance(sweep.search, OptunaSearch), "refused by SweepConfig"
    with Progress("measuring what drafts cost", console=console):
        points = listed_points(sweep.space, sweep.search)
        store_break_even(sweep, points, decoding_gpus(sweep, sweep.trial({})))


def _confirm(
    sweep: SweepConfig, best: list[Trial], last: Rung, progress_actor: Any, concurrent: int, console: Console
) -> list[Finalist]:
    """Train the best trials again from other seeds, then measure all side by side with nothing else running."""
    points: dict[str, dict[int, Choices]] = {}
    for trial in best:
        first = sweep.trial(trial.choices).train.seed
        points[trial.folder.name] = {first: trial.choices}
        if _SEED not in sweep.space:
            others = range(first + 1, first + sweep.confirm.seeds)
            points[trial.folder.name] |= {seed: {**trial.choices, _SEED: seed} for seed in others}
    new = [choices for seeds in points.values() for choices in list(seeds.values())[1:]]
    if new:
        console.print(f"the best {len(best)} once more, from other seeds", highlight=False)
        known = {folder.path for folder in trial_folders(sweep.output)}
        total = len(known | {trial_folder(sweep.output, choices).path for choices in new})
        with follow_sweep(progress_actor, sweep.output, total, sweep.objective):
            train_all(sweep, new, last, progress_actor, concurrent)
    folders = {
        name: {seed: trial_folder(sweep.output, choices) for seed, choices in seeds.items()}
        for name, seeds in points.items()
    }
    trained = {
        name: {seed: str(folder.path) for seed, folder in seeds.items() if folder.state == "finished"}
        for name, seeds in folders.items()
    }
    figures = _measure_together(sweep, tuple(path for seeds in trained.values() for path in seeds.values()), console)
    return [
        Finalist(
            trial.name,
            trial.choices,
            {seed: figures[folder_key(path)] for seed, path in trained[trial.folder.name].items()},
            trained[trial.folder.name],
        )
        for trial in best
    ]


def _measure_together(sweep: SweepConfig, folders: tuple[str, ...], console: Console) -> dict[str, MeasuredFigures]:
    path = Path(sweep.output).absolute() / _FINAL_FILE
    names = sorted(map(folder_key, folders))
    if path.is_file() and sorted(read_json(path)) == names:
        return read_json(path)
    with Progress(f"measuring {len(folders)} drafters side by side", console=console):
        found = measure_on_ray(sweep, sweep.trial({}), folders)
    write_json_atomically(path, found)
    return found


def _crown(sweep: SweepConfig, finalists: list[Finalist], output: Path) -> None:
    """Copy the best of the winner's drafters to best/."""
    finalist = max(finalists, key=lambda one: statistics.fmean(one.objectives(sweep.objective)))
    seeds = dict(zip(finalist.seeds, finalist.objectives(sweep.objective), strict=True))
    source, best = Path(finalist.folders[max(seeds, key=lambda seed: seeds[seed])]), output / "best"
    best.mkdir(exist_ok=True)
    (best / "drafter.json").unlink(missing_ok=True)  # written last: a folder without it holds no drafter
    for name in ("drafter.safetensors", "metrics.jsonl", RUN_FILE, "drafter.json"):
        shutil.copyfile(source / name, best / f".{name}.tmp")
        (best / f".{name}.tmp").replace(best / name)


def _write(sweep: SweepConfig, trials: list[Trial], finalists: list[Finalist], output: Path) -> Summary:
    sure = how_sure(finalists, sweep.objective)
    first = sure["finalists"][0]
    found = searched(trials, sweep.space, sweep.objective).trials
    summary: Summary = {
        "winner": {
            "name": first["name"],
            "choices": first["choices"],
            "objective": first["mean"],
            "spread": first["spread"],
            "folder": str(output / "best"),
        },
        "objective": sweep.objective,
        "sure": sure,
        "ranks": rank_agreement(found),
        "trials": [trial.summary() for trial in trials],
        "training_tokens": sum(trial.training_tokens for trial in trials),
        "search_tokens": sum(trial.training_tokens for trial in found),
        "wall_seconds": seconds_run(output),
        "machine": machine(),
        "versions": versions(),
        "config": _recorded(sweep).model_dump(mode="json"),
    }
    write_sweep(summary, trials, output)
    return summary


def _recorded(sweep: SweepConfig) -> SweepConfig:
    """The sweep's configuration as recorded in its folder, with absolute paths."""
    output = str(Path(sweep.output).absolute())
    return sweep.model_copy(update={"resume": False, "output": output, "decoding": _located(sweep.decoding)})


def _check_folder(sweep: SweepConfig, output: Path) -> None:
    """Refuse a folder that holds another sweep, or this one with different trainings: the files that `distill` names
    may have been edited. A folder without a sweep is fine.

    Raises:
        MismatchError: names the first differing key and both values.
    """
    if not (output / RUN_FILE).is_file():
        return
    check_sweep_folder(output, _recorded(sweep), _fingerprints(sweep))
    check_same_trainings(output, sweep.trial({}), (_DISTILL_FILE, _OLD_DISTILL_FILE), "trainings")


def _shipped(sweep: SweepConfig, output: Path) -> SweepConfig:
    """The configuration for the trials, with absolute paths and a resolved copy of `distill`: trials may have another
    working directory, and the files may be edited while the sweep runs."""
    path = output / _DISTILL_FILE
    write_text_atomically(path, yaml.safe_dump(sweep.trial({}).model_dump(mode="json"), sort_keys=False))
    return sweep.model_copy(
        update={"output": str(output), "decoding": _located(sweep.decoding), "distill": (str(path),)}
    )


def _located(decoding: DecodingConfig) -> DecodingConfig:
    return decoding.model_copy(update={"questions": str(Path(decoding.questions).absolute())})


def _fingerprints(sweep: SweepConfig) -> dict[str, str]:
    base = sweep.trial({})
    return {
        **run_fingerprints(base),
        "data_shards": str(base.workers.max_workers * base.train.gradient_accumulation_steps),
        "questions": sha256_of_files([Path(sweep.decoding.questions)]),
    }
