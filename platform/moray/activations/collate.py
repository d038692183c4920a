"""From cached shards to training batches: which chats of an epoch go together, and how they become tensors.

Planning needs chat lengths only, so the number of batches is known before the first byte is read, a run
resumes at any batch without replaying the ones before, and every worker computes the same plan.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from moray.activations.codec import codec
from moray.activations.schema import hidden_column, kv_column
from moray.batch import TapNeeds, Taps, TrainBatch
from moray.errors import DataError

_WINDOW_BATCHES = 16


@dataclass(frozen=True)
class Window:
    """Row groups that are read together, and the batches they are mixed into.

    `batches` holds rows of the concatenated row groups, `num_rows` in all; `first_step` is the step of the
    first batch.
    """

    row_groups: list[tuple[str, int]]
    num_rows: int
    batches: list[list[int]]
    first_step: int


@dataclass(frozen=True)
class EpochPlan:
    """One worker's batches of one epoch."""

    windows: list[Window]
    num_steps: int

    def after(self, step: int) -> "EpochPlan":
        """What is left when `step` steps are done."""
        windows = []
        for window in self.windows:
            done = max(0, step - window.first_step)
            if done < len(window.batches):
                windows.append(replace(window, batches=window.batches[done:], first_step=window.first_step + done))
        return EpochPlan(windows, self.num_steps)

    def before(self, step: int) -> "EpochPlan":
        """What there is until `step` steps are done."""
        windows = [
            replace(window, batches=window.batches[: step - window.first_step])
            for window in self.windows
            if window.first_step < step
        ]
        return EpochPlan(windows, min(step, self.num_steps))


def plan_epoch(
    shards: dict[str, list[list[int]]], batch_tokens: int, seed: int, epoch: int, num_workers: int
) -> list[EpochPlan]:
    """Plan one epoch for all workers.

    Row groups are shuffled and dealt so that workers hold nearly equal token counts; each worker mixes
    about 16 batches' worth of row groups at a time, cuts the mix by length into batches of at most
    `batch_tokens` (padding included) and shuffles those. All workers make the same number of steps: the
    few batches that some have more are left out of this epoch.

    Args:
        shards: lengths of the chats by shard and row group.
        batch_tokens: per worker.
        seed: same seed, same plan.
        epoch: counts from 0.
        num_workers: how many plans to make.
    """
    rng = random.Random(f"{seed}/{epoch}")
    units = [(name, index, lengths) for name, groups in sorted(shards.items()) for index, lengths in enumerate(groups)]
    rng.shuffle(units)
    loads = [0] * num_workers
    shares: list[list[tuple[str, int, list[int]]]] = [[] for _ in range(num_workers)]
    for unit in sorted(units, key=lambda unit: -sum(unit[2])) if num_workers > 1 else units:
        worker = loads.index(min(loads))
        shares[worker].append(unit)
        loads[worker] += sum(unit[2])
    plans = []
    for share in shares:
        rng.shuffle(share)
        plans.append(_plan_worker(share, batch_tokens, rng))
    num_steps = min(sum(len(window.batches) for window in plan) for plan in plans)
    return [EpochPlan(plan, num_steps).before(num_steps) for plan in plans]


def _plan_worker(units: list[tuple[str, int, list[int]]], batch_tokens: int, rng: random.Random) -> list[Window]:
    windows: list[Window] = []
    begin, first_step = 0, 0
    while begin < len(units):
        end, tokens = begin, 0
        while end < len(units) and (end == begin or tokens < _WINDOW_BATCHES * batch_tokens):
            tokens += sum(units[end][2])
            end += 1
        chosen = units[begin:end]
        lengths = [length for _, _, chats in chosen for length in chats]
        batches = _cut(lengths, batch_tokens, rng)
        windows.append(Window([(name, index) for name, index, _ in chosen], len(lengths), batches, first_step))
        first_step += len(batches)
        begin = end
    return windows


def _cut(lengths: Sequence[int], batch_tokens: int, rng: random.Random) -> list[list[int]]:
    rows = list(range(len(lengths)))
    rng.shuffle(rows)  # decides among equal lengths
    rows.sort(key=lambda row: lengths[row], reverse=True)
    batches: list[list[int]] = []
    for row in rows:
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches


def needed_columns(needs: TapNeeds, columns: dict[str, Any]) -> list[str]:
    """The columns that a drafter's batches are made of.

    Raises:
        DataError: the cache lacks one; names it, and what to cache.
    """
    wanted = [kv_column(layer) for layer in needs.kv_layers] + [hidden_column(depth) for depth in needs.hidden_depths]
    for name in wanted:
        if name not in columns:
            raise DataError(
                f"the cache has no column '{name}', which this drafter reads; it has {', '.join(columns)}: cache "
                "again with cache.hidden_depths and cache.kv_layers that include it"
            )
    return ["num_tokens", "tokens", "response_mask", *wanted]


def collate(table: pa.Table, needs: TapNeeds, columns: dict[str, Any]) -> TrainBatch:
    """Rows of a shard, with the needed columns, to one padded batch."""
    lengths = table.column("num_tokens").to_numpy().astype(np.int64)
    rows, width = len(lengths), int(lengths.max())
    valid = np.arange(width) < lengths[:, None]
    index = torch.from_numpy(np.flatnonzero(valid.reshape(-1)))

    def pad(values: Tensor) -> Tensor:
        out = values.new_zeros(rows * width, *values.shape[1:])
        return out.index_copy_(0, index, values).view(rows, width, *values.shape[1:])

    tokens = torch.from_numpy(_flat(table, "tokens").astype(np.int64))
    response = torch.from_numpy(_flat(table, "response_mask").astype(np.bool_))
    kv = None
    if needs.kv_layers:
        kv = pad(torch.stack([_decode(table, kv_column(layer), columns) for layer in needs.kv_layers], dim=1))
    hidden = {depth: pad(_decode(table, hidden_column(depth), columns)) for depth in needs.hidden_depths}
    return TrainBatch(pad(tokens), pad(response), torch.from_numpy(lengths), Taps(kv, hidden))


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _decode(table: pa.Table, name: str, columns: dict[str, Any]) -> Tensor:
    column = columns[name]
    data = np.concatenate([_bytes_of(chunk) for chunk in table.column(name).chunks])
    return codec(column["codec"]).decode(data, column["width"])


def _bytes_of(array: pa.BinaryArray) -> np.ndarray:
    """The values' bytes of a binary array as one uint8 array, without a copy."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(array.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
