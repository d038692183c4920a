"""Training batches as a Ray Data stream: only the needed columns, read ahead, in plan order."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import ray
import ray.data

from moray.activations.collate import EpochPlan, Window, collate, needed_columns
from moray.activations.manifest import Manifest
from moray.activations.store import CacheStore
from moray.batch import TapNeeds, TrainBatch


def stream_batches(
    uri: str, manifest: Manifest, plan: EpochPlan, needs: TapNeeds, prefetch: int = 2
) -> Iterator[TrainBatch]:
    """Batches of one worker's (rest of an) epoch, exactly in plan order.

    Ray Data tasks read windows of row groups with the needed columns alone; tensors are made here, on the
    consumer's side, so that activations travel encoded. Memory is bounded by `prefetch` windows.
    """
    if not plan.windows:
        return
    columns = needed_columns(needs, manifest.columns)
    items = [{"window": json.dumps(asdict(window))} for window in plan.windows]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _read_window,
        fn_args=(uri, columns),
        batch_size=1,
        num_cpus=0.5,
        concurrency=prefetch,
    )
    tables = _rows_by_batch(dataset, plan)
    for table in tables:
        yield collate(table, needs, manifest.columns)


def _read_window(batch: dict[str, Any], uri: str, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the batches of a window, one table each, with the step they belong to."""
    store = CacheStore(uri)
    for text in batch["window"]:
        window = Window(**json.loads(text))
        by_shard: dict[str, list[int]] = {}
        for shard, row_group in window.row_groups:
            by_shard.setdefault(shard, []).append(row_group)
        # Row numbers follow the order of `row_groups`, which names each row group once.
        read = {name: store.read_row_groups(name, groups, columns) for name, groups in by_shard.items()}
        table = _in_window_order(window, store, read, by_shard)
        for offset, rows in enumerate(window.batches):
            chosen = table.take(pa.array(rows))
            yield chosen.append_column("step", pa.array([window.first_step + offset] * len(rows), pa.int64()))


def _in_window_order(
    window: Window, store: CacheStore, read: dict[str, pa.Table], by_shard: dict[str, list[int]]
) -> pa.Table:
    sizes = {name: store.read_json(f"shards/{name}.json")["row_groups"] for name in by_shard}
    pieces: dict[tuple[str, int], pa.Table] = {}
    for name, groups in by_shard.items():
        begin = 0
        for group in groups:
            count = len(sizes[name][group])
            pieces[name, group] = read[name].slice(begin, count)
            begin += count
    return pa.concat_tables([pieces[shard, group] for shard, group in window.row_groups])


def _rows_by_batch(dataset: "ray.data.Dataset", plan: EpochPlan) -> Iterator[pa.Table]:
    """Put blocks together to whole batches: Ray may split a large one."""
    expected = (len(rows) for window in plan.windows for rows in window.batches)
    pending: list[pa.Table] = []
    num_pending, size = 0, next(expected)
    for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        while block.num_rows:
            taken = block.slice(0, size - num_pending)
            pending.append(taken)
            num_pending += taken.num_rows
            block = block.slice(taken.num_rows)
            if num_pending == size:
                yield pa.concat_tables(pending).drop_columns(["step"])
                pending, num_pending, size = [], 0, next(expected, 0)
