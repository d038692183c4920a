"""Training batches as a Ray Data stream: only the needed columns, read ahead, in plan order."""

import json
from collections.abc import Iterator
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
    items = [{"window": json.dumps(window.row_groups)} for window in plan.windows]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        cast(Any, read_window),  # Ray's own types leave generators of Arrow tables out
        fn_args=(uri, columns),
        batch_size=1,
        num_cpus=0.5,
        compute=ray.data.TaskPoolStrategy(size=min(prefetch, len(items))),
    )
    # Or a resumed run would not repeat an unbroken one.
    dataset.context.execution_options.preserve_order = True
    for table in _batch_tables(dataset, plan):
        yield collate(table, needs, manifest.columns)


def _batch_tables(dataset: "ray.data.Dataset", plan: EpochPlan) -> Iterator[pa.Table]:
    """The rows of every batch, as views into the window they are mixed from. Ray may split a large window."""
    blocks = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    arriving = cast(Iterator[pa.Table], iter(blocks))
    for window in plan.windows:
        pieces = [next(arriving)]
        while sum(piece.num_rows for piece in pieces) < window.num_rows:
            pieces.append(next(arriving))
        table = pa.concat_tables(pieces)
        for rows in window.batches:
            yield pa.concat_tables([table.slice(row, 1) for row in rows])
