"""Writes shards row group by row group, and reads them with each row group checked against the shard's marker."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moray.activations.format.atomic_file import AtomicFile
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.errors import DamagedError


def shard_writer(sink: AtomicFile, schema: pa.Schema, compression: str) -> pq.ParquetWriter:
    """Return a writer for the row groups of a shard; as a context manager, it completes the file at the end.

    Args:
        sink: the shard's file.
        schema: the shard's schema (see `shard_schema`).
        compression: as in `CacheConfig`.
    """
    codec: Any = compression  # pyarrow's type stubs list only a few codecs
    return pq.ParquetWriter(sink, schema, compression=codec, use_dictionary=False, write_page_checksum=True)


def checked_row_groups(store: CacheStore, info: ShardInfo, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yield a shard's row groups, one in memory at a time.

    A generator, so that an error in the caller, such as a failed write, is not reported as damage to this shard.

    Args:
        store: the cache.
        info: the shard's marker.
        columns: columns to read; None for all.

    Raises:
        DataError: the shard cannot be read.
        DamagedError: the shard does not hold what its marker says.
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
    """Return an error that says what is wrong with a shard and how to have it rewritten."""
    return DamagedError(
        f"shard '{store.uri}/shards/{name}.parquet' is damaged: {reason}; run "
        f"python -m pipelines.cache_activations verify {json.dumps(store.uri)} verify.repair=true"
    )
