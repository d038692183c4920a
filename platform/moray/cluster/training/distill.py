"""Distillation on Ray Train, seen from the driver: start workers, outlive their deaths, hand out the drafter."""

import json
import shutil
from pathlib import Path
from typing import Any

import ray
import ray._private.state
import ray.exceptions
import ray.train
from ray.core.generated import gcs_pb2
from ray.train.torch import TorchTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group

from moray.activations.format.manifest import read_layout, write_manifest
from moray.activations.format.scan import scan
from moray.activations.format.store import CacheStore
from moray.activations.reading.token_counts import token_counts
from moray.cluster.caching.capture import lay_out_cache
from moray.cluster.errors import own_errors
from moray.cluster.progress_actor import ProgressActor, follow
from moray.cluster.training.configs import TrainingConfig
from moray.cluster.training.data_shards import num_workers, run_data_shards
from moray.cluster.training.live import open_source
from moray.cluster.training.precision import resolve_precision
from moray.cluster.training.resume import begin_or_resume, is_complete, withdraw
from moray.cluster.training.validate import check_validation, validate_last, validation_of
from moray.cluster.training.worker import (
    RUN_NAME,
    WorkerSettings,
    checkpoint_step,
    newest_checkpoint,
    open_run_trackers,
    work,
)
from moray.distill.initial import check_initial
from moray.distill.tracking.metrics import send_validation
from moray.distill.tracking.trackers import check_trackers
from moray.errors import DataError
from moray.text import ChatTokenizer


def distill(config: TrainingConfig) -> Path:
    """Train what the configuration names, or go on with it; returns the folder that holds it. Needs a Ray session.

    Ray keeps the run below `config.output`, so that the same command after a kill finds its last
    checkpoint. Workers that die are replaced up to `max_failures` times, and so is what controls them.

    Raises:
        MismatchError: the cache was made from another target, or the folder holds another run.
        ConfigError: the machine has too few CPUs or GPUs for the workers, or the run too few data shards.
        DataError: no complete cache, a missing column, or a loss or gradient that is not finite.
    """
    is_complete(config)  # raises what speaks against it
    check_trackers(config.trackers)
    num_asked_workers = num_workers(config)
    config = resolve_precision(config)
    check_validation(config)
    _check_initial(config)
    begin_or_resume(config)
    _lay_out(config)
    _count_tokens(config)
    output = Path(config.output).absolute()
    progress_actor: Any = ProgressActor.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    with follow(progress_actor, config.label):
        checkpoint = _train(config, progress_actor, num_asked_workers)
    _close_cache(config)
    validate_last(config, checkpoint, output)
    _send_validation(config, output, progress_actor)
    hand_out(checkpoint, output)
    return output


def train_until(config: TrainingConfig, stop_step: int, progress_actor: Any) -> ray.train.Checkpoint:
    """Train a drafter up to a step of its run, from wherever the run is, and give its checkpoint there.

    Several calls with growing steps are one run: schedules follow `config.train`, whatever the parts. Needs a Ray
    session and a complete cache. Unlike `distill` it neither shows progress nor validates.

    Raises:
        As `distill`.
    """
    is_complete(config)  # raises what speaks against it
    output = Path(config.output).absolute()
    newest = newest_checkpoint(output)
    if newest is not None and checkpoint_step(newest) >= stop_step:
        return newest
    num_asked_workers = num_workers(config)
    free_workers()  # of one before that died here
    config = resolve_precision(config)
    _check_initial(config)
    begin_or_resume(config)
    _count_tokens(config)
    return _train(config, progress_actor, num_asked_workers, stop_step)


def hand_out(checkpoint: ray.train.Checkpoint, output: Path) -> None:
    """Copy the drafter of a checkpoint into a folder, whole or not at all; drafter.json comes last."""
    with checkpoint.as_directory() as folder:
        for name in ("drafter.safetensors", "drafter.json"):
            shutil.copyfile(Path(folder) / name, output / f".{name}.tmp")
            (output / f".{name}.tmp").replace(output / name)


def _train(
    config: TrainingConfig, progress_actor: Any, num_asked_workers: int | tuple[int, int], stop_step: int | None = None
) -> ray.train.Checkpoint:
    """Run workers until they are done; the run's newest checkpoint."""
    output = Path(config.output).absolute()
    result = _fit(config, progress_actor, num_asked_workers, stop_step)
    failure: Any = ray.get(progress_actor.failure.remote())
    if failure is not None:
        if newest_checkpoint(output) is None:
            withdraw(config)  # nothing is lost, and a corrected configuration can start here
        raise failure
    checkpoint = newest_checkpoint(output) or result.checkpoint
    if checkpoint is None:
        raise DataError(f"'{output}' holds no checkpoint although training ended: is the cache empty?")
    return checkpoint


def _fit(
    config: TrainingConfig, progress_actor: Any, num_asked_workers: int | tuple[int, int], stop_step: int | None
) -> ray.train.Result:
    """Run Ray Train to its end. Ray replaces workers; if its controller dies, begin again where the run was."""
    for failures_left in range(config.workers.max_failures, -1, -1):
        try:
            with own_errors():
                return _trainer(config, progress_actor, num_asked_workers, stop_step).fit()
        except ray.exceptions.RayActorError:
            if not failures_left:
                raise
            free_workers()
    raise AssertionError("unreachable")


def _trainer(
    config: TrainingConfig, progress_actor: Any, num_asked_workers: int | tuple[int, int], stop_step: int | None
) -> TorchTrainer:
    output = Path(config.output).absolute()
    _drop_truncated_snapshot(output)
    settings = WorkerSettings(config, output, run_data_shards(config), stop_step, progress_actor)
    return _Trainer(
        work,
        train_loop_config={"settings": settings},
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_asked_workers,
            use_gpu=config.workers.use_gpu,
            resources_per_worker=config.workers.resources,
        ),
        run_config=ray.train.RunConfig(
            name=RUN_NAME,
            storage_path=str(output / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=config.workers.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.train.keep_checkpoints),
        ),
        validation_config=validation_of(config, output),
    )


class _Trainer(TorchTrainer):
    """Leaves Ctrl-C alone: Ray Train would end the process with exit code 0, as if training were done, and go on
    answering Ctrl-C when it is over."""

    def _register_sigint_handler(self, controller: Any) -> None:  # private: Ray Train has no setting for it
        pass


def free_workers() -> None:
    """Give back what the workers of dead controllers had reserved: Ray keeps it until the driver ends."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id()).binary()
    # Ray's public table does not tell who made a group, and there is none but this way to be sure.
    accessor: Any = ray._private.state.state._connect_and_get_accessor()
    messages: Any = gcs_pb2
    for text in accessor.get_placement_group_table():
        group = messages.PlacementGroupTableData.FromString(text)
        by_actor = not ray.ActorID(group.creator_actor_id).is_nil()  # Tune's own groups are a driver's
        if by_actor and group.creator_actor_dead and group.creator_job_id == job:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


def _send_validation(config: TrainingConfig, output: Path, progress_actor: Any) -> None:
    """Tell the trackers of what was validated after the last report of training."""
    if config.validation is not None and config.trackers:
        trackers = open_run_trackers(config, output, progress_actor)
        send_validation(output, trackers)
        for tracker in trackers:
            tracker.close()


def _check_initial(config: TrainingConfig) -> None:
    """Refuse weights that a new run cannot start from, before anything starts."""
    if config.initial_weights is not None and newest_checkpoint(Path(config.output).absolute()) is None:
        text = ChatTokenizer.load(config.target.model, config.target.template).fingerprint
        check_initial(config.initial_weights, config.learner, config.target.model, text)


def _lay_out(config: TrainingConfig) -> None:
    """Tokenise and plan what targets will make on the way."""
    source = config.source
    if source.type != "disk":
        is_kept = source.type == "hybrid"
        lay_out_cache(config.activations, config.target, source.chats, source.cache, source.capture, is_kept)


def _close_cache(config: TrainingConfig) -> None:
    """Make a cache of the shards that were written on the way; training may have ended before all were."""
    if config.source.type != "hybrid":
        return
    store = CacheStore(config.activations)
    if store.exists("manifest.json"):
        return
    layout, written = read_layout(store), scan(store).planned
    planned = layout.shards.keys()
    if planned <= written:
        write_manifest(store, layout.chats)
    else:
        print(
            f"{config.activations}: {len(written)} of {len(planned)} shards are written; pipelines.cache_activations "
            "with the same chats and cache completes it"
        )


def _count_tokens(config: TrainingConfig) -> None:
    """Count once, before every worker asks for it."""
    if config.learner.num_draft_tokens is not None:
        store = CacheStore(config.activations)
        token_counts(store, open_source(config).plan.target.vocab_size)


def _drop_truncated_snapshot(output: Path) -> None:
    """Remove Ray's list of checkpoints if a kill cut it short: Ray writes it in place, and would refuse to start.
    `newest_checkpoint` finds the checkpoints without the list."""
    path = output / "ray" / RUN_NAME / "checkpoint_manager_snapshot.json"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        path.unlink()
