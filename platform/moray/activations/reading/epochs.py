"""Plans the batches of an epoch.

An epoch is planned for a fixed number of data shards. One update takes one batch of every data shard, regardless of
which worker computes it:

    update        0    1    2    3
    data shard 0  b00  b01  b02  b03      worker 0 of 2
    data shard 1  b10  b11  b12  b13      worker 1 of 2
    data shard 2  b20  b21  b22  b23      worker 0 of 2, after b0x

Gradient accumulation and the number of workers therefore change which worker computes what, but not the updates.
Planning needs only chat lengths: the number of updates is known before the first byte is read, a run resumes at any
update without replaying earlier ones, and every worker computes the same plan.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

_POOL_BATCHES = 16
_MAX_PADDING = 0.08
"""Maximum fraction of padding in one batch; over a whole epoch it is far smaller."""

_RowGroup = tuple[str, int, list[int]]
"""Shard name, index within the shard, and lengths of the row group's chats."""


@dataclass(frozen=True)
class Window:
    """Row groups that are read together, and the batches that mix them.

    `batches` holds row indices into the concatenated row groups, which have `num_rows` rows; `first_step` is the step
    of the first batch.
    """

    row_groups: list[tuple[str, int]]
    num_rows: int
    batches: list[list[int]]
    first_step: int
    num_tokens: int = 0
    """Tokens of all rows, which are all read."""


@dataclass(frozen=True)
class EpochPlan:
    """Batches of one data shard in one epoch."""

    windows: list[Window]
    num_steps: int

    def after(self, step: int) -> "EpochPlan":
        """Return the plan without its first `step` steps."""
        windows = []
        for window in self.windows:
            done = max(0, step - window.first_step)
            if done < len(window.batches):
                windows.append(replace(window, batches=window.batches[done:], first_step=window.first_step + done))
        return EpochPlan(windows, self.num_steps)

    def before(self, step: int) -> "EpochPlan":
        """Return the first `step` steps of the plan."""
        windows = [
            replace(window, batches=window.batches[: step - window.first_step])
            for window in self.windows
            if window.first_step < step
        ]
        return EpochPlan(windows, min(step, self.num_steps))


def plan_epoch(
    shards: dict[str, list[list[int]]],
    batch_tokens: int,
    seed: int,
    epoch: int,
    num_data_shards: int,
    window_tokens: int | None = None,
) -> list[EpochPlan]:
    """Plan one epoch for all data shards.

    Row groups are shuffled and distributed so that data shards hold nearly equal token counts. Each data shard takes
    pools of row groups, a pool being worth about 16 batches, and cuts a pool into windows of row groups of similar
    length (one window, unless `window_tokens` is smaller than the pool). A window is cut by length into batches with
    little padding and at most `batch_tokens`, padding included. Windows and batches are shuffled. All data shards make
    the same number of steps: where one has fewer batches, those with the most chats are cut in two.

    Args:
        shards: chat lengths by shard and row group.
        batch_tokens: maximum tokens per batch, that is, per data shard and update.
        seed: the same seed gives the same plan.
        epoch: number of the epoch, from 0.
        num_data_shards: number of plans to make.
        window_tokens: maximum tokens that a data shard reads at a time, but at least one row group.
    """
    rng = random.Random(f"{seed}/{epoch}")
    units = [(name, index, lengths) for name, groups in sorted(shards.items()) for index, lengths in enumerate(groups)]
    rng.shuffle(units)
    loads = [0] * num_data_shards
    shares: list[list[_RowGroup]] = [[] for _ in range(num_data_shards)]
    for unit in sorted(units, key=lambda unit: -sum(unit[2])) if num_data_shards > 1 else units:
        data_shard = loads.index(min(loads))
        shares[data_shard].append(unit)
        loads[data_shard] += sum(unit[2])
    pool_tokens = _POOL_BATCHES * batch_tokens
    most = min(pool_tokens, window_tokens or pool_tokens)
    data_shards = []
    for share in shares:
        rng.shuffle(share)
        data_shards.append(_plan_data_shard(share, batch_tokens, pool_tokens, most, rng))
    wanted = max(_num_steps(windows) for windows in data_shards)
    for windows in data_shards:
        _cut_in_two(windows, wanted - _num_steps(windows))
    # Fewer than `wanted` only if a data shard has fewer chats than that.
    num_steps = min(_num_steps(windows) for windows in data_shards)
    return [EpochPlan(_number(windows, rng), num_steps).before(num_steps) for windows in data_shards]


def _num_steps(windows: list[Window]) -> int:
    return sum(len(window.batches) for window in windows)


def _cut_in_two(windows: list[Window], times: int) -> None:
    """Cut the batch with the most chats in two, `times` times or until each batch holds one chat.

    Both halves stay in the batch's window.
    """
    heap = [(-len(batch), i, batch) for i, window in enumerate(windows) for batch in window.batches]
    heapq.heapify(heap)
    for _ in range(times):
        if not heap or len(heap[0][2]) < 2:
            return
        _, i, batch = heapq.heappop(heap)
        upper = batch[len(batch) // 2 :]
        del batch[len(batch) // 2 :]
        windows[i].batches.append(upper)
        for half in (batch, upper):
            heapq.heappush(heap, (-len(half), i, half))


def _number(windows: list[Window], rng: random.Random) -> list[Window]:
    """Shuffle every window's batches and set the first step of each window."""
    numbered, first_step = [], 0
    for window in windows:
        rng.shuffle(window.batches)
        numbered.append(replace(window, first_step=first_step))
        first_step += len(window.batches)
    return numbered


def _plan_data_shard(
    share: list[_RowGroup], batch_tokens: int, pool_tokens: int, window_tokens: int, rng: random.Random
) -> list[Window]:
    windows: list[Window] = []
    for pool in _runs(share, pool_tokens):
        # Group similar lengths, so that batches of a small window are as full as those of a large one.
        alike = sorted(pool, key=lambda unit: sum(unit[2]) / len(unit[2]))
        pieces = _runs(alike, window_tokens)
        rng.shuffle(pieces)
        for piece in pieces:
            lengths = [length for _, _, chats in piece for length in chats]
            names = [(name, index) for name, index, _ in piece]
            windows.append(Window(names, len(lengths), _cut(lengths, batch_tokens, rng), 0, sum(lengths)))
    return windows


def _runs(units: list[_RowGroup], max_tokens: int) -> list[list[_RowGroup]]:
    """Cut a list into runs of at most `max_tokens` tokens; a larger row group is a run of its own."""
    runs: list[list[_RowGroup]] = []
    tokens = 0
    for unit in units:
        size = sum(unit[2])
        if not runs or tokens + size > max_tokens:
            runs.append([])
            tokens = 0
        runs[-1].append(unit)
        tokens += size
    return runs


def _cut(lengths: Sequence[int], batch_tokens: int, rng: random.Random) -> list[list[int]]:
    rows = list(range(len(lengths)))
    rng.shuffle(rows)  # breaks ties between equal lengths
    rows.sort(key=lambda row: lengths[row], reverse=True)
    batches: list[list[int]] = []
    tokens = 0
    for row in rows:
        padded = lengths[batches[-1][0]] * (len(batches[-1]) + 1) if batches else 0
        if not batches or padded > batch_tokens or tokens + lengths[row] < (1.0 - _MAX_PADDING) * padded:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += lengths[row]
    return batches


def whole_shards(shards: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Merge each shard into one row group, so that a plan keeps all chats of a shard in the same window."""
    return {name: [[length for group in groups for length in group]] for name, groups in shards.items()}


def by_row_groups(plan: EpochPlan, shards: dict[str, list[list[int]]]) -> EpochPlan:
    """Convert a plan made with `whole_shards` back to row groups; row indices do not change."""
    windows = [
        replace(window, row_groups=[(name, i) for name, _ in window.row_groups for i in range(len(shards[name]))])
        for window in plan.windows
    ]
    return EpochPlan(windows, plan.num_steps)
