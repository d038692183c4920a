"""Joins many small shards into few large ones. Torch-free.

Row groups are copied unchanged, one in memory at a time. A joined shard is committed like any other and records which
planned shards it contains; from then on it counts in their place (`moray.activations.format.scan`), so that a job may
be killed at any time. Readers of the old manifest find the old shards until the new manifest is written.
"""

from collections.abc import Iterable

from moray.activations.format.row_groups import checked_row_groups, damaged, shard_writer
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore


def plan_compaction(shards: Iterable[ShardInfo], token_bytes: int, shard_mib: int) -> list[list[ShardInfo]]:
    """Group the shards to join; those that are large enough are left alone.

    Sizes are computed from token counts, which joining does not change: a resumed or repeated compaction finds the same
    groups, and none if nothing is left to join.
    """
    limit = shard_mib << 20
    groups: list[list[ShardInfo]] = []
    room = 0
    for info in sorted(shards, key=lambda info: min(info.planned)):
        size = info.tokens * token_bytes
        if size > limit:
            continue
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(info)
        room -= size
    return [group for group in groups if len(group) > 1]


def join(store: CacheStore, group: list[ShardInfo], compression: str) -> ShardInfo:
    """Join several shards into one, write and commit it.

    Raises:
        DataError: one of them cannot be read.
        DamagedError: one of them does not hold what its marker says, or its columns differ from the first one's.
    """
    made_of = sorted(name for info in group for name in info.planned)
    name = f"{made_of[0]}-x{len(made_of)}"
    row_groups: list[list[int]] = []
    with store.open_output(f"shards/{name}.parquet") as sink:
        with store.open_shard(group[0].name) as first:
            schema = first.schema_arrow
        with shard_writer(sink, schema, compression) as writer:
            for info in group:
                for table in checked_row_groups(store, info):
                    if table.schema != schema:
                        raise damaged(store, info.name, "its columns are not those of the others")
                    writer.write_table(table, row_group_size=table.num_rows)
                row_groups += info.row_groups
        num_bytes, digest = sink.num_bytes, sink.sha256
    squares = {column: sum(info.hidden_square_sums[column] for info in group) for column in group[0].hidden_square_sums}
    rows, tokens = sum(info.rows for info in group), sum(info.tokens for info in group)
    joined = ShardInfo(name, rows, tokens, num_bytes, digest, row_groups, squares, made_of)
    store.commit(joined)
    return joined


def remove_superseded(store: CacheStore, names: Iterable[str]) -> None:
    """Delete shards that the manifest no longer names."""
    for name in names:
        store.uncommit(name)
