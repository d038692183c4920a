"""What two processes of a DeepSpeed test do: train every drafter with DDP and with ZeRO on the same data shards."""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from one_step import as_data_shard
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build, losses_for
from tiny_targets import TinyTarget, load_target

from moray.batch import DataShardBatch
from moray.distill.configs import AdamWConfig, DeepSpeedConfig, LinearSchedule, TrainConfig
from moray.distill.optim import Optimiser
from moray.distill.parallel import Parallel, Replicas
from moray.distill.step import UpdateContext, data_shards_of, num_rounds, run_update
from moray.drafters.base import Drafter

DATA_SHARDS, STEPS = 3, 4
MAX_GRAD_NORM = 0.5
"""Small enough for clipping to be at work."""
ADAMW = AdamWConfig(type="adamw", lr=1e-3, weight_decay=0.1)
SCHEDULE = LinearSchedule(type="linear", warmup_steps=2)
Trained = dict[str, Any]


def spawn(work: Any, *arguments: Any) -> None:
    """Run work(rank, port, *arguments) in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, *arguments), nprocs=2)


def begin(rank: int, port: int) -> None:
    """Join the group of two."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def zero(stage: int, offload: bool = False) -> DeepSpeedConfig:
    """A stage of ZeRO in which no weight is kept whole."""
    return DeepSpeedConfig(type="deepspeed", stage=stage, offload_optimizer=offload, persistence_threshold=0)  # type: ignore[arg-type]


def wrap(drafter: Drafter, how: DeepSpeedConfig | None, train: TrainConfig) -> Parallel:
    """DDP, or ZeRO."""
    optimiser = Optimiser(drafter, ADAMW, SCHEDULE)
    if how is None:
        return Replicas(drafter, optimiser, losses_for(drafter), train)
    from moray.distill.zero import Zero

    return Zero(drafter, optimiser, losses_for(drafter), train, how)


def updates(parallel: Parallel, data_shards: list[DataShardBatch], first: int, last: int) -> list[list[float]]:
    """Train; loss and gradient norm of every update."""
    rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = []
    for step in range(first, last):
        context = UpdateContext(step, 10, 10, 0.5, num_rounds(DATA_SHARDS), 0)
        result = run_update(
            parallel, [data_shards[data_shard] for data_shard in data_shards_of(rank, workers, DATA_SHARDS)], context
        )
        metrics = result.metrics(losses_for(parallel.drafter))
        rows.append([metrics["loss"], metrics["grad_norm"]])
    return rows


def train_and_resume(rank: int, port: int, folder: Path, ways: dict[str, dict[str, DeepSpeedConfig | None]]) -> None:
    """All that the tests compare, in one pair of processes: importing DeepSpeed takes longer than the training."""
    tiny = load_target(folder / f"target-{rank}")
    small = load_target(folder / f"small-{rank}", num_hidden_layers=3, hidden_size=32)
    begin(rank, port)  # afterwards transformers would save on one process alone
    train_every_drafter(rank, tiny, folder, ways)
    resume_everywhere(rank, small, folder)
    torch.distributed.destroy_process_group()


def train_every_drafter(rank: int, tiny: TinyTarget, folder: Path, ways: dict[str, dict[str, Any]]) -> None:
    """Per drafter and way: losses, weights and optimiser state, to `folder`."""
    for name, of_drafter in ways.items():
        for way, how in of_drafter.items():
            drafter = build(tiny, VARIANTS[name]).train()
            texts = [
                [tiny.prompt(10 * data_shard + row, 12 + 5 * data_shard) for row in range(2)]
                for data_shard in range(DATA_SHARDS)
            ]
            data_shards = [
                as_data_shard(batch_of(tiny.target, text, 4, drafter.needs), i) for i, text in enumerate(texts)
            ]
            parallel = wrap(drafter, how, TrainConfig(max_grad_norm=MAX_GRAD_NORM))
            rows = updates(parallel, data_shards, 0, STEPS)
            weights, state = parallel.weights(), parallel.state_dict()
            if rank == 0:
                whole = {key: value.clone() for key, value in weights.items()}
                torch.save({"rows": rows, "weights": whole, "state": state}, folder / f"{name}-{way}.pt")


def resume_everywhere(rank: int, tiny: TinyTarget, folder: Path) -> None:
    """Two updates with each of DDP, ZeRO-2 and ZeRO-3, and two more with each: nine chains, to `folder`."""
    ways = [None, zero(2), zero(3)]
    train = TrainConfig(max_grad_norm=MAX_GRAD_NORM)
    build_one = lambda: build(tiny, VARIANTS["moa-0"]).train()  # noqa: E731
    texts = [
        [tiny.prompt(10 * data_shard + row, 12 + 5 * data_shard) for row in range(2)]
        for data_shard in range(DATA_SHARDS)
    ]
    data_shards = [as_data_shard(batch_of(tiny.target, text, 4, build_one().needs), i) for i, text in enumerate(texts)]
    for i, how in enumerate(ways):
        first = wrap(build_one(), how, train)
        updates(first, data_shards, 0, 2)
        kept = [{k: v.clone() for k, v in some.items()} for some in (first.weights(), first.state_dict())]
        torch.distributed.broadcast_object_list(kept, src=0)
        for j, other in enumerate(ways):
            drafter = build_one()
            drafter.load_state_dict(kept[0])
            second = wrap(drafter, other, train)
            second.load_state_dict({key: value.clone() for key, value in kept[1].items()})
            rows = updates(second, data_shards, 2, 4)
            weights = second.weights()
            if rank == 0:
                torch.save(
                    {"rows": rows, "weights": {k: v.clone() for k, v in weights.items()}}, folder / f"{i}-{j}.pt"
                )
