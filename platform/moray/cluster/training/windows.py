"""Reading one window of the cache inside a Ray task. Torch-free: every new worker process imports this, and torch would
make it three times as slow to start."""

from collections.abc import Sequence

import pyarrow as pa

from moray.activations.format.store import CacheStore


def read_window(row_groups: Sequence[tuple[str, int]], uri: str, columns: list[str]) -> pa.Table:
    """A window's chats, row group after row group, in the order that its batches count them.

    The mixing happens at the consumer, where a row is a view: here it would be one more copy of everything.

    Args:
        row_groups: pairs of shard and index, each named once.
        uri: the cache.
        columns: all that is read.
    """
    store = CacheStore(uri)
    by_shard: dict[str, list[int]] = {}
    for shard, group in row_groups:
        by_shard.setdefault(shard, []).append(group)
    pieces: dict[tuple[str, int], pa.Table] = {}
    for shard, groups in by_shard.items():  # every shard is opened once
        lengths = store.read_marker(shard).row_groups
        table = store.read_row_groups(shard, groups, columns)
        begin = 0
        for group in groups:
            pieces[shard, group] = table.slice(begin, len(lengths[group]))
            begin += len(lengths[group])
    return pa.concat_tables([pieces[shard, group] for shard, group in row_groups])
