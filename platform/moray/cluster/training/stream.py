"""Training batches as a stream: only the needed columns, read ahead, in plan order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import torch

from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import Manifest
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import data_shard_batch
from moray.activations.reading.epochs import EpochPlan, Window
from moray.batch import DataShardBatch, TapNeeds
from moray.cluster.training.live import LiveTargets
from moray.cluster.training.read_ahead import tables_ahead


@dataclass(frozen=True)
class Reader:
    """How one worker reads a cache."""

    uri: str
    manifest: Manifest
    needs: TapNeeds
    device: torch.device | str = "cpu"
    """Where taps are decoded."""
    prefetch: int = 2
    """Windows that are read ahead."""
    targets: LiveTargets | None = None
    """Make the windows in place of reading them."""


def stream_updates(reader: Reader, plans: Mapping[int, EpochPlan]) -> Iterator[list[DataShardBatch]]:
    """The batches of some data shards of (the rest of) an epoch, update after update, exactly in plan order.

    The caller should empty each list: its batches are views that keep whole windows alive.

    Ray tasks read windows of row groups with the needed columns alone; tensors are made here, on the consumer's side,
    so that activations travel encoded. Memory is bounded: one open window per data shard and `reader.prefetch` more.

    Args:
        reader: of the cache.
        plans: by data shard; all with the same steps.
    """
    # Windows in the order in which they are opened: a data shard opens its next one when the last is used up.
    order = sorted(
        ((window.first_step, data_shard, window) for data_shard, plan in plans.items() for window in plan.windows),
        key=lambda item: item[:2],
    )
    if not order:
        return
    decoder = TapDecoder.open(CacheStore(reader.uri), reader.manifest, reader.device)
    windows = [window for _, _, window in order]
    arriving = tables_ahead(reader.uri, reader.manifest, reader.needs, windows, reader.prefetch, reader.targets)
    open_windows: dict[int, tuple[Window, pa.Table]] = {}
    last = max(window.first_step + len(window.batches) for _, _, window in order)
    upcoming = iter(order)
    following = next(upcoming, None)
    for step in range(order[0][0], last):
        while following is not None and following[0] == step:
            open_windows.pop(following[1], None)  # frees its memory before the next one takes more
            open_windows[following[1]] = (following[2], next(arriving))
            following = next(upcoming, None)
        views = ((data_shard, _rows_of(*open_windows[data_shard], step)) for data_shard in sorted(plans))
        yield [data_shard_batch(rows, reader.needs, decoder, data_shard) for data_shard, rows in views]


def _rows_of(window: Window, table: pa.Table, step: int) -> pa.Table:
    """The chats of one step: views into the window."""
    return pa.concat_tables([table.slice(row, 1) for row in window.batches[step - window.first_step]])
