"""Runs one Ray Train worker: builds, resumes, streams its data shards, trains, reports and saves."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import get_device

from moray.activations.format.manifest import Manifest
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import bytes_per_token, needed_columns
from moray.activations.reading.epochs import EpochPlan, by_row_groups, plan_epoch, whole_shards
from moray.activations.reading.token_counts import token_counts
from moray.batch import DataShardBatch, TapNeeds
from moray.cluster.errors import own_errors
from moray.cluster.training.configs import TrainingConfig
from moray.cluster.training.live import LiveTargets, open_source
from moray.cluster.training.stream import Reader, stream_updates
from moray.cluster.training.validate import is_validated
from moray.distill.checkpoint import load_training, save_training, whole_checkpoint_step
from moray.distill.finite import NonFiniteError, write_record
from moray.distill.initial import initialise
from moray.distill.loop import Progress, Span, train
from moray.distill.optim import Optimiser
from moray.distill.parallel import Parallel, Replicas
from moray.distill.step import data_shards_of
from moray.distill.tracking.metrics import MetricsWriter
from moray.distill.tracking.sinks import Sink, open_trackers
from moray.drafters.checkpoint import load_weights, save_learner
from moray.drafters.learner import Learner
from moray.errors import DataError, MorayError, UnreachableError
from moray.provenance import read_json
from moray.targets.head import TargetHead

RUN_NAME = "train"


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of every worker of a run; picklable."""

    config: TrainingConfig
    output: Path
    """Absolute path of the run's folder."""
    num_data_shards: int
    """Number of data shards of the run, regardless of its current number of workers."""
    stop_step: int | None
    """Step at which training stops for now, if that is before the end of the run."""
    progress_actor: Any
    """Handle of the `ProgressActor` that receives the progress of training."""


def work(loop_config: dict[str, WorkerSettings]) -> None:
    """Run one Ray Train worker. Only machine failures are worth a restart: Moray's own errors would recur.

    Args:
        loop_config: dictionary, as Ray Train requires, whose only key is "settings".
    """
    settings = loop_config["settings"]
    if ray.get(settings.progress_actor.failure.remote()) is not None:
        return
    try:
        with own_errors():
            _train(settings)
    except UnreachableError:  # may become reachable again
        raise
    except MorayError as error:
        ray.get(settings.progress_actor.fail.remote(error))
        raise


def newest_checkpoint(output: Path) -> ray.train.Checkpoint | None:
    """Return the complete checkpoint with the most steps in a run's folder, regardless of Ray's list of checkpoints.

    Ray copies a checkpoint file by file and lists it afterwards: one that a kill left incomplete is skipped.
    """
    steps = {
        step: folder
        for folder in (output / "ray" / RUN_NAME).glob("checkpoint_*")
        if folder.is_dir() and (step := whole_checkpoint_step(folder)) is not None
    }
    return ray.train.Checkpoint.from_directory(str(steps[max(steps)])) if steps else None


def checkpoint_step(checkpoint: ray.train.Checkpoint) -> int:
    """Return the number of updates made up to a checkpoint."""
    with checkpoint.as_directory() as folder:
        return int(read_json(Path(folder) / "training.json")["step"])


def open_run_trackers(config: TrainingConfig, output: Path, progress_actor: Any) -> list[Sink]:
    """Open the trackers that the configuration names, each with the run's settings."""
    settings = config.model_dump(mode="json", exclude={"ray", "trackers"})
    return open_trackers(config.trackers, output, settings, progress_actor.warn.remote)


@dataclass(frozen=True)
class _Worker:
    """Rank of this worker, and number of workers."""

    rank: int
    num_workers: int

    @property
    def is_first(self) -> bool:
        """Whether this worker writes for all."""
        return self.rank == 0


def _train(settings: WorkerSettings) -> None:
    config, output, progress_actor = settings.config, settings.output, settings.progress_actor
    torch.set_num_threads(config.workers.threads_per_worker)
    context = ray.train.get_context()
    worker = _Worker(context.get_world_rank(), context.get_world_size())
    manifest = open_source(config)
    device = get_device()
    drafter = build_learner(config, manifest, device.type).to(device)
    plans = plan_data_shards(config, manifest, drafter.needs, settings.num_data_shards)
    newest = newest_checkpoint(output)
    if newest is None and config.initial_weights is not None:
        initialise(drafter, config.initial_weights, config.target.model)
    parallel, first = _resume(config, drafter, worker, newest)
    if newest is not None and not _is_listed(newest):
        _save(parallel, first, manifest, worker, is_validated(config, first.step))
        if worker.is_first:  # all workers have read it: a report waits for all of them
            shutil.rmtree(newest.path, ignore_errors=True)
    span = _span(plans, config, first, settings.num_data_shards, settings.stop_step)
    reader = Reader(
        config.activations, manifest, drafter.needs, device, config.workers.prefetch_windows, _targets(config, worker)
    )
    mine = data_shards_of(worker.rank, worker.num_workers, settings.num_data_shards)
    updates = _updates([{data_shard: plan[data_shard] for data_shard in mine} for plan in plans], span, reader)
    trackers = open_run_trackers(config, output, progress_actor) if worker.is_first else []
    writer = MetricsWriter(output, first.step, trackers) if worker.is_first else None
    if worker.is_first:
        progress_actor.start.remote(first.step, span.last_step)

    def report(progress: Progress, metrics: dict[str, float]) -> None:
        if writer is not None:
            writer.write(progress, metrics)
            progress_actor.update.remote(progress.step, metrics)

    def save(progress: Progress) -> None:
        _save(parallel, progress, manifest, worker, is_validated(config, progress.step))

    try:
        train(parallel, updates, span, config.losses, config.train, report, save)
    except NonFiniteError as error:
        if worker.is_first:
            write_record(output, error.record)
        raise DataError(str(error)) from None
    finally:  # the metrics up to an error are the ones that people need
        if writer is not None:
            writer.close()


def _resume(
    config: TrainingConfig, drafter: Learner, worker: _Worker, checkpoint: ray.train.Checkpoint | None
) -> tuple[Parallel, Progress]:
    """Wrap the drafter for training, from a checkpoint or from the beginning."""
    if checkpoint is None:
        return _wrap(config, drafter, worker), Progress()
    with checkpoint.as_directory() as folder:
        load_weights(Path(folder), drafter)  # before workers share it
        parallel = _wrap(config, drafter, worker)
        return parallel, load_training(Path(folder), parallel)


def _is_listed(checkpoint: ray.train.Checkpoint) -> bool:
    """Return whether Ray lists the checkpoint from which a run resumes. Its list lags behind: a checkpoint that was
    complete when workers died, or whose list was lost, must be reported again, or it would never be validated and
    removed."""
    listed = ray.train.get_checkpoint()
    return listed is not None and Path(listed.path).name == Path(checkpoint.path).name


def _wrap(config: TrainingConfig, drafter: Learner, worker: _Worker) -> Parallel:
    optimiser = Optimiser(drafter, config.optim, config.schedule)
    if config.parallel.type == "deepspeed":
        from moray.distill.zero import Zero  # the import takes seconds, and few need it

        return Zero(drafter, optimiser, config.losses, config.train, config.parallel)
    return Replicas(drafter, optimiser, config.losses, config.train)


def _save(parallel: Parallel, progress: Progress, manifest: Manifest, worker: _Worker, is_validated_now: bool) -> None:
    weights, state = parallel.weights(), parallel.state_dict()  # all workers take part in gathering shared state
    if not worker.is_first:
        ray.train.report({"step": progress.step})
        return
    with tempfile.TemporaryDirectory() as folder:
        save_learner(Path(folder), parallel.drafter, manifest.plan.text_fingerprint, weights)
        save_training(Path(folder), state, progress)
        ray.train.report(
            {"step": progress.step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            validation=is_validated_now,
        )


def build_learner(config: TrainingConfig, manifest: Manifest, device_type: str = "cpu") -> Learner:
    """Build a freshly initialised drafter, the same on every worker for the same seed.

    Raises:
        DataError: the cache lacks a column that the drafter reads.
    """
    # Load the head on the worker's device, which need not be the first choice of `target.device`, and in the training
    # precision, because the projection onto the vocabulary is a large part of the work.
    narrow = {"dtype": config.train.precision} if config.train.precision == "bfloat16" else {}
    target = config.target.model_copy(update={"device": device_type} | narrow)
    head = TargetHead.load(target, config.num_head_layers)
    torch.manual_seed(config.train.seed)
    drafter = config.learner.build(head)
    store = CacheStore(config.activations)
    needed_columns(drafter.needs, manifest.columns, store if config.source.type == "disk" else None)
    drafter.set_scale(manifest.hidden_rms)
    if drafter.vocabulary.is_reduced:
        counts = token_counts(store, drafter.spec.vocab_size)
        drafter.choose_vocabulary(torch.from_numpy(counts))
    return drafter


def _targets(config: TrainingConfig, worker: _Worker) -> LiveTargets | None:
    """Return this worker's share of the targets that compute activations during training; None if a cache is read."""
    if config.source.type == "disk":
        return None
    return LiveTargets(config.target, config.source, config.source.capture.num_targets // worker.num_workers)


def plan_data_shards(
    config: TrainingConfig, manifest: Manifest, needs: TapNeeds, num_data_shards: int
) -> list[list[EpochPlan]]:
    """Plan every epoch for every data shard.

    Raises:
        DataError: a data shard gets no batch.
    """
    batch_tokens = config.train.batch_tokens
    window_bytes = (config.workers.window_mib << 20) // config.train.gradient_accumulation_steps
    window_tokens = max(batch_tokens, window_bytes // bytes_per_token(needs, manifest.columns))
    plans, lengths, makes_shards = [], manifest.lengths, False
    for epoch in range(config.train.epochs):
        makes_shards = config.source.type == "hybrid" and epoch == 0
        lengths = whole_shards(manifest.lengths) if makes_shards else manifest.lengths
        data_shards = plan_epoch(lengths, batch_tokens, config.train.seed, epoch, num_data_shards, window_tokens)
        plans.append([by_row_groups(plan, manifest.lengths) for plan in data_shards] if makes_shards else data_shards)
    if not any(data_shards[0].num_steps for data_shards in plans):
        what, size = ("shards", "cache.shard_mib") if makes_shards else ("row groups", "cache.batch_tokens")
        raise DataError(
            f"the cache's {what} ({sum(map(len, lengths.values()))}, {manifest.num_tokens:,} tokens) are too few for "
            f"{num_data_shards} data shards (workers times batches in an update): lower workers.num_workers or "
            f"train.gradient_accumulation_steps, cache more chats, or cache them again with a lower {size}"
        )
    return plans


def _span(
    plans: list[list[EpochPlan]], config: TrainingConfig, first: Progress, num_data_shards: int, stop_step: int | None
) -> Span:
    total = sum(data_shards[0].num_steps for data_shards in plans)
    per_epoch = -(-total // len(plans))
    return Span(first, min(total, config.train.max_steps or total), per_epoch, len(plans), num_data_shards, stop_step)


def _updates(plans: list[dict[int, EpochPlan]], span: Span, reader: Reader) -> Iterator[list[DataShardBatch]]:
    """Yield this worker's batches from `span.first` to the last step, epoch after epoch."""
    begin = 0
    for data_shards in plans:
        end = min(begin + next(iter(data_shards.values())).num_steps, span.last_step)
        if span.first.step < end:
            done = max(0, span.first.step - begin)
            yield from stream_updates(
                reader, {data_shard: plan.before(end - begin).after(done) for data_shard, plan in data_shards.items()}
            )
        begin = end
