"""Training batches as a Ray Data stream: only the needed columns, read ahead, in plan order."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import ray
import ray.data
import torch

from moray.activations.collate import bytes_per_token, lane_batch, needed_columns
from moray.activations.decode import TapDecoder
from moray.activations.epochs import EpochPlan, Window
from moray.activations.manifest import Manifest
from moray.activations.store import CacheStore
from moray.batch import LaneBatch, TapNeeds
from moray.cluster.live import LiveTargets, LiveWindows
from moray.cluster.windows import read_window

_LEAST_OBJECT_STORE = 512 << 20  # below a few of its default blocks Ray Data hardly starts a task


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


def stream_updates(reader: Reader, plans: Mapping[int, EpochPlan]) -> Iterator[list[LaneBatch]]:
    """The batches of some lanes of (the rest of) an epoch, update after update, exactly in plan order.

    Whoever takes a list should empty it: its batches are views that keep whole windows alive.

    Ray Data tasks read windows of row groups with the needed columns alone; tensors are made here, on the
    consumer's side, so that activations travel encoded. Memory is bounded: one open window per lane and
    `reader.prefetch` more.

    Args:
        reader: of the cache.
        plans: by lane; all with the same steps.
    """
    # Windows in the order in which they are opened: a lane opens its next one when the last is used up.
    order = sorted(
        ((window.first_step, lane, window) for lane, plan in plans.items() for window in plan.windows),
        key=lambda item: item[:2],
    )
    if not order:
        return
    decoder = TapDecoder.open(CacheStore(reader.uri), reader.manifest, reader.device)
    arriving = _tables(_read([window for _, _, window in order], reader), [window for _, _, window in order])
    open_windows: dict[int, tuple[Window, pa.Table]] = {}
    last = max(window.first_step + len(window.batches) for _, _, window in order)
    upcoming = iter(order)
    following = next(upcoming, None)
    for step in range(order[0][0], last):
        while following is not None and following[0] == step:
            open_windows.pop(following[1], None)  # frees its memory before the next one takes more
            open_windows[following[1]] = (following[2], next(arriving))
            following = next(upcoming, None)
        views = ((lane, _rows_of(*open_windows[lane], step)) for lane in sorted(plans))
        yield [lane_batch(rows, reader.needs, decoder, lane) for lane, rows in views]


def _rows_of(window: Window, table: pa.Table, step: int) -> pa.Table:
    """The chats of one step: views into the window."""
    return pa.concat_tables([table.slice(row, 1) for row in window.batches[step - window.first_step]])


def _read(windows: list[Window], reader: Reader) -> "ray.data.Dataset":
    items = [{"window": json.dumps(window.row_groups)} for window in windows]
    source = ray.data.from_items(items, override_num_blocks=len(items))
    dataset = (
        _made(source, windows, reader) if _needs_targets(windows, reader) else _read_from_disk(source, windows, reader)
    )
    options = dataset.context.execution_options
    # Or a resumed run would not repeat an unbroken one.
    options.preserve_order = True
    # Windows that nobody has asked for yet wait unread, not finished in the object store.
    largest = max(window.num_tokens for window in windows) * bytes_per_token(reader.needs, reader.manifest.columns)
    waiting = max((reader.prefetch + 1) * largest, _LEAST_OBJECT_STORE)
    options.resource_limits = options.resource_limits.copy(object_store_memory=waiting)
    return dataset


def _read_from_disk(source: "ray.data.Dataset", windows: list[Window], reader: Reader) -> "ray.data.Dataset":
    return source.map_batches(
        cast(Any, read_window),  # Ray's own types leave generators of Arrow tables out
        fn_args=(reader.uri, needed_columns(reader.needs, reader.manifest.columns)),
        batch_size=1,
        num_cpus=0.5,
        compute=ray.data.TaskPoolStrategy(size=min(reader.prefetch, len(windows))),
    )


def _made(source: "ray.data.Dataset", windows: list[Window], reader: Reader) -> "ray.data.Dataset":
    targets = reader.targets
    assert targets is not None
    columns = needed_columns(reader.needs, reader.manifest.columns)
    return source.map_batches(
        cast(Any, LiveWindows),
        fn_constructor_args=targets.arguments(reader.uri, reader.needs, columns),
        batch_size=1,
        num_cpus=targets.source.capture.cpus_per_target,
        num_gpus=targets.source.capture.gpus_per_target,
        compute=ray.data.ActorPoolStrategy(size=min(targets.num_targets, len(windows))),
    )


def _needs_targets(windows: list[Window], reader: Reader) -> bool:
    """Whether anything must be made: what a hybrid run has written once is read."""
    if reader.targets is None or reader.targets.source.type == "stream":
        return reader.targets is not None
    written = {name.removesuffix(".json") for name in CacheStore(reader.uri).names("shards", ".json")}
    return any(shard not in written for window in windows for shard, _ in window.row_groups)


def _tables(dataset: "ray.data.Dataset", windows: list[Window]) -> Iterator[pa.Table]:
    """One table per window; Ray may split a large one."""
    arriving = cast(
        Iterator[pa.Table], iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1))
    )
    for window in windows:
        yield _whole(window, arriving)


def _whole(window: Window, arriving: Iterator[pa.Table]) -> pa.Table:
    pieces = [next(arriving)]
    while sum(piece.num_rows for piece in pieces) < window.num_rows:
        pieces.append(next(arriving))
    return pa.concat_tables(pieces)
