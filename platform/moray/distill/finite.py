"""Stops a run whose loss or gradient is not finite, and reports which data caused it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from moray.distill.parallel import num_workers
from moray.distill.step import DataShardResult, UpdateResult
from moray.errors import DataError
from moray.provenance import write_json_atomically

NONFINITE_FILE = "nonfinite.json"
_NAMED = 3


class NonFiniteError(DataError):
    """A loss or gradient is not finite; `record` holds the details."""

    def __init__(self, message: str, record: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.record = record or {}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write a run's `nonfinite.json`. Losses that are not finite are written as text."""
    write_json_atomically(folder / NONFINITE_FILE, json.loads(json.dumps(record), parse_constant=lambda name: name))


@dataclass(frozen=True)
class _Pending:
    update: int
    result: UpdateResult
    learning_rate: float
    flag: Tensor
    copied: "torch.cuda.Event | None"


class FiniteWatch:
    """Checks every update while the next one is running, so that the device never waits for the check."""

    def __init__(self) -> None:
        self._pending: _Pending | None = None

    def follow(self, update: int, result: UpdateResult, learning_rate: float) -> None:
        """Start checking `update` (1 for the first)."""
        flag, copied = result.may_go_on, None
        if flag.is_cuda:
            flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._pending = _Pending(update, result, learning_rate, flag, copied)

    def check(self) -> None:
        """Check the update passed to the last `follow`. All workers call it together.

        Raises:
            NonFiniteError: on every worker, if the update is not finite on any of them.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.copied is not None:
            pending.copied.synchronize()
        if not bool(pending.flag):
            record = _record(pending)
            raise NonFiniteError(_message(record), record)


def _record(pending: _Pending) -> dict[str, Any]:
    mine = [_describe(data_shard) for data_shard in pending.result.data_shards]
    gathered: list[Any] = [mine]
    if num_workers() > 1:
        gathered = [None] * num_workers()
        torch.distributed.all_gather_object(gathered, mine)
    data_shards = sorted(
        (data_shard for worker in gathered for data_shard in worker), key=lambda data_shard: data_shard["data_shard"]
    )
    guilty = [data_shard for data_shard in data_shards if not math.isfinite(data_shard["loss"])]
    return {
        "update": pending.update,
        "grad_norm": float(pending.result.grad_norm),
        "learning_rate": pending.learning_rate,
        "data_shards": guilty or data_shards,  # if only the gradient overflowed, it may be any of them
    }


def _describe(data_shard: DataShardResult) -> dict[str, Any]:
    return {"data_shard": data_shard.data_shard, "loss": float(data_shard.loss), "uids": list(data_shard.uids)}


def _message(record: dict[str, Any]) -> str:
    data_shards = record["data_shards"]
    uids = [uid for data_shard in data_shards for uid in data_shard["uids"]]
    chats = ", ".join(uids[:_NAMED]) + (f" and {len(uids) - _NAMED} more" if len(uids) > _NAMED else "")
    if math.isfinite(data_shards[0]["loss"]):
        what = f"the gradient is {record['grad_norm']} though every loss is finite"
    else:
        what = f"the loss of data shard {data_shards[0]['data_shard']} is {data_shards[0]['loss']}"
    return (
        f"update {record['update']}: {what}; its chats are {chats} (all of them in {NONFINITE_FILE}): give another "
        "output and a lower optim.lr, or cache the activations again"
    )
