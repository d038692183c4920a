"""Runs a sweep over sparse targets: check, train and measure every trial, report. Requires a Ray session."""

import random
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import needed_columns
from moray.bench.sparse.quality import read_texts
from moray.cluster.training.distill import free_workers
from moray.cluster.training.outline import outline_learner
from moray.cluster.training.resume import run_fingerprints
from moray.distill.tracking.trackers import check_trackers
from moray.errors import ConfigError, DataError
from moray.provenance import machine, sha256_of_files, versions, write_text_atomically
from moray.text import ChatTokenizer
from sweeps.reports.results import first_message, read_trials
from sweeps.sparse.configs import SparseSweepConfig
from sweeps.sparse.report import write_sparse_sweep
from sweeps.sparse.results import SparseSummary, rows_of
from sweeps.sparse.trial import SIZE_KEY, run_sparse_trial
from sweeps.tuning.concurrency import concurrent_trials
from sweeps.tuning.configs import RandomSearch
from sweeps.tuning.folders import trial_folders
from sweeps.tuning.progress import SweepProgressActor, follow_sweep
from sweeps.tuning.resume import (
    alone,
    begin_or_resume_sweep,
    check_same_trainings,
    is_done,
    running_clock,
    seconds_run,
)
from sweeps.tuning.spaces import Choices, corners_of, draw_distinct, grid, lies_in
from sweeps.tuning.tuner import Plan, tune_listed

_SPARSIFY_FILE = "sparsify.yaml"
"""File with the resolved configuration that all trials share."""


def run_sparse_sweep(sweep: SparseSweepConfig, console: Console) -> SparseSummary:
    """Run or resume a sweep; returns the contents of summary.json.

    Raises:
        ConfigError, DataError, MismatchError: a check failed; nothing has been started.
        DataError: no trial was trained to the end.
    """
    output = Path(sweep.output).absolute()
    _check_trainings(sweep)
    check_sparse_sweep(sweep)
    base = sweep.trial({})
    quality = sweep.quality
    concurrent = concurrent_trials(base, sweep, "quality", quality.cpus, quality.gpus)
    progress_actor: Any = SweepProgressActor.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    points = _points(sweep)
    with alone(output):
        begin_or_resume_sweep(output, _recorded(sweep), _fingerprints(sweep))
        with running_clock(output):
            shipped = _shipped(sweep, output).model_dump_json()
            console.print(f"{len(points)} sparse targets, {concurrent} at a time", highlight=False)
            others = sum(not lies_in(one.record["choices"], sweep.space) for one in trial_folders(sweep.output))

            def run(choices: Choices) -> None:
                run_sparse_trial(choices, shipped, progress_actor)

            plan = Plan(
                output=sweep.output,
                run=run,
                size_key=SIZE_KEY,
                sizes=[0],
                reduction=None,
                concurrent=concurrent,
                max_failures=sweep.max_failures,
                tidy=free_workers,
            )
            with follow_sweep(progress_actor, sweep.output, len(points) + others, "agreement"):
                tune_listed(plan, points)
        return _write(sweep, output)


def is_complete(sweep: SparseSweepConfig) -> bool:
    """Whether the sweep is done. An unfinished sweep is refused unless `resume` is set.

    Raises:
        MismatchError: the folder holds another sweep.
        ConfigError: the folder holds an unfinished sweep, and `resume` is not set.
    """
    _check_trainings(sweep)
    return is_done(Path(sweep.output), _recorded(sweep), lambda: _fingerprints(sweep), sweep.resume)


def check_sparse_sweep(sweep: SparseSweepConfig) -> None:
    """Check every corner of the space without training.

    Raises:
        ConfigError: a key or value is not accepted, the chats do not exist, or the source is not a cache.
        DataError: the cache is incomplete or lacks a column, or no chat has a response.
        MismatchError: the cache belongs to another target.
    """
    base = sweep.trial({})
    if base.source.type != "disk":
        raise ConfigError(f"source.type is {base.source.type}; all trials of a sweep read one cache: cache it first")
    quality, tokenizer = sweep.quality, ChatTokenizer.load(base.target.model, base.target.template)
    read_texts(quality.chats, tokenizer, quality.max_chats, quality.max_length, quality.skip_chats)
    check_trackers(base.trackers)
    run_fingerprints(base)  # refuses a cache of another target
    manifest = read_manifest(CacheStore(base.activations))
    for choices in corners_of(sweep.space):
        needed_columns(outline_learner(sweep.trial(choices)).needs, manifest.columns)


def _points(sweep: SparseSweepConfig) -> list[Choices]:
    if isinstance(sweep.search, RandomSearch):
        return draw_distinct(sweep.space, sweep.search.num_trials, random.Random(sweep.search.seed))
    return list(grid(sweep.space))


def _write(sweep: SparseSweepConfig, output: Path) -> SparseSummary:
    trials = read_trials(sweep.output)
    rows = rows_of(trials)
    if not any(row["figures"] for row in rows):
        raise DataError(f"not one trial of '{output}' was trained to the end{first_message(trials)}")
    summary: SparseSummary = {
        "trials": rows,
        "training_tokens": sum(trial.training_tokens for trial in trials),
        "wall_seconds": seconds_run(output),
        "machine": machine(),
        "versions": versions(),
        "config": _recorded(sweep).model_dump(mode="json"),
    }
    write_sparse_sweep(summary, trials, output)
    return summary


def _recorded(sweep: SparseSweepConfig) -> SparseSweepConfig:
    """The sweep's configuration as recorded in its folder, with absolute paths."""
    chats = str(Path(sweep.quality.chats).absolute())
    quality = sweep.quality.model_copy(update={"chats": chats})
    output = str(Path(sweep.output).absolute())
    return sweep.model_copy(update={"resume": False, "output": output, "quality": quality})


def _check_trainings(sweep: SparseSweepConfig) -> None:
    check_same_trainings(Path(sweep.output).absolute(), sweep.trial({}), (_SPARSIFY_FILE,), "sparse targets")


def _shipped(sweep: SparseSweepConfig, output: Path) -> SparseSweepConfig:
    """The configuration for the trials, with absolute paths and a resolved copy of `sparsify`: trials may have another
    working directory, and the files may be edited while the sweep runs."""
    path = output / _SPARSIFY_FILE
    write_text_atomically(path, yaml.safe_dump(sweep.trial({}).model_dump(mode="json"), sort_keys=False))
    return _recorded(sweep).model_copy(update={"sparsify": (str(path),)})


def _fingerprints(sweep: SparseSweepConfig) -> dict[str, str]:
    base = sweep.trial({})
    return {
        **run_fingerprints(base),
        "data_shards": str(base.workers.max_workers * base.train.gradient_accumulation_steps),
        "chats": sha256_of_files([Path(sweep.quality.chats)]),
    }
