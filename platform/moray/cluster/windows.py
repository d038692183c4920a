"""Reading one window of the cache inside a Ray Data task. Torch-free: every new task process imports this,
and torch would make it three times as slow to start."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from moray.activations.store import CacheStore


def read_window(batch: dict[str, Any], uri: str, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the training batches of a window, one table each.

    Args:
        batch: under "window" the window's row groups ([shard, index], each named once) and batches (rows of
            those row groups, one behind the other), as JSON.
        uri: the cache.
        columns: all that is read.
    """
    store = CacheStore(uri)
    for text in batch["window"]:
        window = json.loads(text)
        table = _read_row_groups(store, [tuple(pair) for pair in window["row_groups"]], columns)
        for rows in window["batches"]:
            yield table.take(pa.array(rows))


def _read_row_groups(store: CacheStore, row_groups: list[tuple[str, int]], columns: list[str]) -> pa.Table:
    """Row groups of several shards in the given order; every shard is opened once."""
    by_shard: dict[str, list[int]] = {}
    for shard, group in row_groups:
        by_shard.setdefault(shard, []).append(group)
    pieces: dict[tuple[str, int], pa.Table] = {}
    for shard, groups in by_shard.items():
        lengths = store.read_json(f"shards/{shard}.json")["row_groups"]
        table = store.read_row_groups(shard, groups, columns)
        begin = 0
        for group in groups:
            pieces[shard, group] = table.slice(begin, len(lengths[group]))
            begin += len(lengths[group])
    return pa.concat_tables([pieces[pair] for pair in row_groups])
