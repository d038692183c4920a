"""Reading a shard row group by row group, each checked against the shard's marker."""

import json
from collections.abc import Iterator

import pyarrow as pa

from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.errors import DamagedError


def checked_row_groups(store: CacheStore, info: ShardInfo, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """A shard's row groups, one in memory at a time.

    A generator, so that what fails while writing is not taken for damage of what is read.

    Args:
        store: the cache.
        info: the shard's marker.
        columns: to read; None for all.

    Raises:
        DamagedError: the shard cannot be read, or does not hold what its marker says.
    """
    with store.open_shard(info.name) as file:
        if file.metadata.num_row_groups != len(info.row_groups):
            raise damaged(store, info.name, "its row groups are not the marker's")
        for index, lengths in enumerate(info.row_groups):
            table = file.read_row_group(index, columns=columns, use_threads=False)
            if table.column("num_tokens").to_pylist() != lengths:
                raise damaged(store, info.name, f"the chats of row group {index} are not the marker's")
            yield table


def damaged(store: CacheStore, name: str, reason: str) -> DamagedError:
    """A shard that is not what it should be, and how to have it made again."""
    return DamagedError(
        f"shard '{store.uri}/shards/{name}.parquet' is damaged: {reason}; run "
        f"python -m pipelines.cache_activations verify {json.dumps(store.uri)} verify.repair=true"
    )
