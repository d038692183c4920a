"""Training batches as a Ray Data stream: only the needed columns, read ahead, in plan order."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

import pyarrow as pa
import ray
import ray.data

from moray.activations.collate import EpochPlan, collate, needed_columns
from moray.activations.manifest import Manifest
from moray.batch import TapNeeds, TrainBatch
from moray.cluster.windows import read_window


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
        cast(Any, read_window),  # Ray's own types leave generators of Arrow tables out
        fn_args=(uri, columns),
        batch_size=1,
        num_cpus=0.5,
        compute=ray.data.TaskPoolStrategy(size=min(prefetch, len(items))),
    )
    # Or a resumed run would not repeat an unbroken one.
    dataset.context.execution_options.preserve_order = True
    for table in _whole_batches(dataset, plan):
        yield collate(table, needs, manifest.columns)


def _whole_batches(dataset: "ray.data.Dataset", plan: EpochPlan) -> Iterator[pa.Table]:
    """Put blocks together to whole batches: Ray may split a large one."""
    expected = (len(rows) for window in plan.windows for rows in window.batches)
    pending: list[pa.Table] = []
    num_pending, size = 0, next(expected)
    blocks = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    for block in cast(Iterator[pa.Table], blocks):
        while block.num_rows:
            taken = block.slice(0, size - num_pending)
            pending.append(taken)
            num_pending += taken.num_rows
            block = block.slice(taken.num_rows)
            if num_pending == size:
                yield pa.concat_tables(pending)
                pending, num_pending, size = [], 0, next(expected, 0)
