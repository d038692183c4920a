"""Distillation on Ray Train: data-parallel workers around the torch-only loop, checkpoints, exact resume."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device

from moray.activations.collate import EpochPlan, needed_columns, plan_epoch
from moray.activations.manifest import Manifest, read_manifest
from moray.activations.store import CacheStore
from moray.activations.token_counts import token_counts
from moray.batch import TrainBatch
from moray.cluster.board import Board, follow
from moray.cluster.claim import claim, is_complete
from moray.cluster.configs import DistilConfig
from moray.cluster.errors import own_errors
from moray.cluster.stream import stream_batches
from moray.distill.checkpoint import (
    load_training,
    load_weights,
    save_drafter,
    save_training,
    whole_checkpoint_step,
)
from moray.distill.configs import TrainConfig
from moray.distill.loop import Progress, Span, train
from moray.distill.metrics import MetricsWriter
from moray.distill.optim import Optimiser
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError, MorayError
from moray.targets.head import TargetHead

_RUN_NAME = "train"


def distil(config: DistilConfig) -> Path:
    """Train a drafter, or go on with one; returns the folder that holds it. Needs a Ray session.

    Ray keeps the run below `config.output`, so that the same command after a kill finds its last
    checkpoint. Workers that die are replaced up to `max_failures` times.

    Raises:
        MismatchError: the cache was made from another target, or the folder holds another run.
        ConfigError: the machine has too few CPUs or GPUs for the workers.
        DataError: no complete cache, a missing column, or a gradient that is not finite.
    """
    is_complete(config)  # raises what speaks against it
    _check_resources(config)
    claim(config)
    _count_tokens(config)
    output = Path(config.output).absolute()
    _mend_snapshot(output)
    board: Any = Board.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"config": config.model_dump_json(), "board": board, "output": str(output)},
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.workers.num_workers,
            use_gpu=config.workers.use_gpu,
            resources_per_worker={"CPU": config.workers.cpus_per_worker},
        ),
        run_config=ray.train.RunConfig(
            name=_RUN_NAME,
            storage_path=str(output / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=config.workers.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=config.train.keep_checkpoints),
        ),
    )
    with follow(board, f"distil {config.drafter.type}"), own_errors():
        result = trainer.fit()
    failure: Any = ray.get(board.failure.remote())
    if failure is not None:
        raise failure
    checkpoint = result.checkpoint or _newest_checkpoint(output)
    if checkpoint is None:
        raise DataError(f"'{output}' holds no checkpoint although training ended: is the cache empty?")
    with checkpoint.as_directory() as folder:
        for name in ("drafter.safetensors", "drafter.json"):
            shutil.copyfile(Path(folder) / name, output / f".{name}.tmp")
            (output / f".{name}.tmp").replace(output / name)
    return output


def _count_tokens(config: DistilConfig) -> None:
    """Count once, before every worker asks for it."""
    if config.drafter.num_draft_tokens is not None:
        store = CacheStore(config.activations)
        token_counts(store, read_manifest(store).plan["target"]["vocab_size"])


def _check_resources(config: DistilConfig) -> None:
    """Refuse workers for which this machine has no room: Ray would wait for them for ever. A cluster may grow."""
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        return
    workers, present = config.workers, ray.cluster_resources()
    wanted = {"CPU": workers.num_workers * workers.cpus_per_worker, "GPU": workers.num_workers * workers.use_gpu}
    for name, field in (("GPU", "workers.use_gpu"), ("CPU", "workers.cpus_per_worker")):
        if wanted[name] > present.get(name, 0):
            raise ConfigError(
                f"workers.num_workers={workers.num_workers} with {field}={getattr(workers, field[8:])} needs "
                f"{wanted[name]:g} {name}s, this machine has {present.get(name, 0):g}; lower them or name a cluster in "
                "ray.address"
            )


def _mend_snapshot(output: Path) -> None:
    """Remove Ray's list of checkpoints if a kill cut it short: Ray writes it in place, and would refuse to start.
    `_newest_checkpoint` finds the checkpoints without the list."""
    path = output / "ray" / _RUN_NAME / "checkpoint_manager_snapshot.json"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        path.unlink()


def _newest_checkpoint(output: Path) -> ray.train.Checkpoint | None:
    """The whole checkpoint with the most steps below a run's folder: for a run whose list of them was lost.

    Ray copies a checkpoint file by file and lists it afterwards: one that a kill cut short is passed over.
    """
    steps = {
        step: folder
        for folder in (output / "ray" / _RUN_NAME).glob("checkpoint_*")
        if folder.is_dir() and (step := whole_checkpoint_step(folder)) is not None
    }
    return ray.train.Checkpoint.from_directory(str(steps[max(steps)])) if steps else None


def _worker(settings: dict[str, Any]) -> None:
    """One Ray Train worker. Only failures of the machine are worth a restart: ours would come again."""
    board = settings["board"]
    if ray.get(board.failure.remote()) is not None:
        return
    try:
        with own_errors():
            _train(settings)
    except MorayError as error:
        ray.get(board.fail.remote(error))
        raise


def _train(settings: dict[str, Any]) -> None:
    config = DistilConfig.model_validate_json(settings["config"])
    torch.set_num_threads(config.workers.threads_per_worker)
    context = ray.train.get_context()
    rank, num_workers = context.get_world_rank(), context.get_world_size()
    store = CacheStore(config.activations)
    manifest = read_manifest(store)
    device = get_device()
    drafter = build_drafter(config, manifest, device.type).to(device)
    optimiser = Optimiser(drafter, config.optim, config.schedule)
    first = Progress()
    checkpoint = ray.train.get_checkpoint() or _newest_checkpoint(Path(settings["output"]))
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            load_weights(Path(folder), drafter)
            first = load_training(Path(folder), optimiser)
    plans = [
        plan_epoch(manifest.lengths, config.train.batch_tokens, config.train.seed, epoch, num_workers)[rank]
        for epoch in range(config.train.epochs)
    ]
    span = _span(plans, config.train, first)
    batches = _batches(plans, span, config, manifest, drafter)
    is_first = rank == 0
    writer = MetricsWriter(Path(settings["output"]), first.step) if is_first else None
    board = settings["board"] if is_first else None
    if board is not None:
        board.start.remote(first.step, span.total_steps)

    def report(progress: Progress, metrics: dict[str, float]) -> None:
        if writer is not None and board is not None:
            writer.write(progress, metrics)
            board.update.remote(progress.step, metrics)

    def save(progress: Progress) -> None:
        if not is_first:
            ray.train.report({"step": progress.step})
            return
        with tempfile.TemporaryDirectory() as folder:
            save_drafter(Path(folder), drafter, manifest.plan["text_fingerprint"])
            save_training(Path(folder), optimiser, progress)
            ray.train.report({"step": progress.step}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    train(drafter, optimiser, batches, span, config.losses, config.train, report, save)
    if writer is not None:
        writer.close()


def build_drafter(config: DistilConfig, manifest: Manifest, device_type: str = "cpu") -> Drafter:
    """A freshly initialised drafter: the same on every worker, for the same seed.

    Raises:
        DataError: the cache lacks a column that it reads.
    """
    # Where the worker trains, which need not be where `target.device` would look first.
    target = config.target.model_copy(update={"device": device_type})
    head = TargetHead.load(target, config.drafter.num_target_layers)
    torch.manual_seed(config.train.seed)
    drafter = config.drafter.build(head)
    needed_columns(drafter.needs, manifest.columns)
    drafter.set_scale(manifest.hidden_rms)
    if drafter.vocabulary.is_reduced:
        counts = token_counts(CacheStore(config.activations), drafter.spec.vocab_size)
        drafter.choose_vocabulary(torch.from_numpy(counts))
    return drafter


def _span(plans: list[EpochPlan], train_config: TrainConfig, first: Progress) -> Span:
    total = sum(plan.num_steps for plan in plans)
    if total == 0:
        raise DataError(
            f"the cache holds too few chats for {train_config.batch_tokens} tokens a batch on every worker; lower "
            "train.batch_tokens or workers.num_workers, or cache more chats"
        )
    per_epoch = -(-total // len(plans))
    return Span(first, min(total, train_config.max_steps or total), per_epoch, len(plans))


def _batches(
    plans: list[EpochPlan], span: Span, config: DistilConfig, manifest: Manifest, drafter: Drafter
) -> Iterator[TrainBatch]:
    """This worker's batches from `span.first` to the last, epoch after epoch."""
    begin = 0
    for plan in plans:
        end = min(begin + plan.num_steps, span.total_steps)
        if span.first.step < end:
            rest = plan.after(max(0, span.first.step - begin)).before(end - begin)
            yield from stream_batches(
                config.activations, manifest, rest, drafter.needs, config.workers.prefetch_windows
            )
        begin = end
