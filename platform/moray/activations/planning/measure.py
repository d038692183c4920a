"""Measures the bytes that a cache occupies and the space left on its file system."""

from pathlib import Path

import pyarrow.fs as pafs

from moray.activations.format.disk_space import DiskSpace, free_bytes
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.errors import DataError


def measure_disk_space(store: CacheStore, cache: CacheConfig) -> DiskSpace:
    """Return the space available to a cache: its quota, and the free space if the file system is local."""
    free, reserve = None, 0
    if isinstance(store.filesystem, pafs.LocalFileSystem):
        free, reserve = free_bytes(Path(store.path("plan.json")).parent)
    return DiskSpace(free, reserve, cache.max_bytes, written_bytes(store))


def written_bytes(store: CacheStore) -> int:
    """Return the bytes of the tokenised parts and of the committed shards."""
    try:
        committed = sum(shard.bytes for shard in store.committed().values())
    except DataError:  # a marker is damaged: the next reader reports it
        committed = 0
    selector = pafs.FileSelector(store.path("tokens"), allow_not_found=True)
    return committed + sum(int(info.size or 0) for info in store.filesystem.get_file_info(selector))
