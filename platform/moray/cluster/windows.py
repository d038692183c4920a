"""Reading one window of the cache inside a Ray Data task. Torch-free: every new task process imports this,
and torch would make it three times as slow to start."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from moray.activations.store import CacheStore


def read_window(batch: dict[str, Any], uri: str, columns: list[str]) -> Iterator[pa.Table]:
    """Yield a window's chats, row group after row group, in the order that its batches count them.

    The mixing happens at the consumer, where a row is a view: here it would be one more copy of everything.

    Args:
        batch: under "window" the window's row groups ([shard, index], each named once) as JSON.
        uri: the cache.
        columns: all that is read.
    """
    store = CacheStore(uri)
    for text in batch["window"]:
        row_groups = [(shard, group) for shard, group in json.loads(text)]
        by_shard: dict[str, list[int]] = {}
        for shard, group in row_groups:
            by_shard.setdefault(shard, []).append(group)
        pieces: dict[tuple[str, int], pa.Table] = {}
        for shard, groups in by_shard.items():  # every shard is opened once
            lengths = store.read_json(f"shards/{shard}.json")["row_groups"]
            table = store.read_row_groups(shard, groups, columns)
            begin = 0
            for group in groups:
                pieces[shard, group] = table.slice(begin, len(lengths[group]))
                begin += len(lengths[group])
        yield pa.concat_tables([pieces[pair] for pair in row_groups])
