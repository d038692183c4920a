"""Compacts a cache on Ray Data: each task joins one group of small shards, one row group in memory at a time."""

from typing import Any, cast

import ray.data

from moray.activations.format.manifest import read_manifest, write_manifest
from moray.activations.format.scan import scan
from moray.activations.format.schema import bytes_per_token
from moray.activations.format.store import CacheStore
from moray.activations.maintenance.compact import join, plan_compaction, remove_superseded
from moray.activations.planning.adding import refuse_while_adding
from moray.cluster.caching.rows import Batch, GroupRow, JoinedRow, batch_of, dataset_of, rows_from, rows_of
from moray.cluster.errors import own_errors
from moray.errors import DamagedError
from moray.progress import Progress


def compact(output: str, shard_mib: int | None, num_tasks: int) -> tuple[int, int]:
    """Join the small shards of a complete cache; return the numbers of shards before and after.

    It may be killed at any time; the same call resumes it. No training run may be reading when it ends: the old
    shards are deleted once the new manifest is in place.

    Args:
        output: path or URI of the cache.
        shard_mib: maximum size of a joined shard; None for the size with which the cache was planned.
        num_tasks: number of shards to write in parallel.

    Raises:
        DataError: the cache is unfinished, columns are being added to it, or a shard cannot be read.
        DamagedError: a shard is damaged; existing shards are unchanged.
    """
    store = CacheStore(output)
    manifest = read_manifest(store)
    refuse_while_adding(store)
    found = scan(store)
    before = len(manifest.shards)
    wanted = {name for info in manifest.shards.values() for name in info.planned}
    damaged = sorted(found.damaged) or sorted(wanted - found.planned)
    if damaged:
        raise DamagedError(
            f"'{output}' has damaged shards ({', '.join(damaged[:3])}): run the caching command again, then compact"
        )
    plan = manifest.plan
    size = shard_mib or plan.cache.shard_mib
    groups = plan_compaction(found.counting.values(), bytes_per_token(plan.columns), size)
    if groups:
        with own_errors():
            _join_all(store, [[info.name for info in group] for group in groups], plan.cache.compression, num_tasks)
        found = scan(store)
    if manifest.shards != found.counting:
        manifest = write_manifest(store, manifest.chats)
    # Only now: until here, readers used the old manifest.
    remove_superseded(store, found.superseded)
    return before, len(manifest.shards)


def _join_all(store: CacheStore, groups: list[list[str]], compression: str, num_tasks: int) -> None:
    dataset = dataset_of([GroupRow(group) for group in groups]).map_batches(
        cast(Any, _join),  # Ray's type stubs omit functions with further arguments
        fn_args=(store, compression),
        batch_size=1,
        num_cpus=1,
        compute=ray.data.TaskPoolStrategy(size=min(num_tasks, len(groups))),
    )
    with Progress("compact", sum(map(len, groups)), unit="shards") as progress:
        for row in rows_from(dataset, JoinedRow):
            progress.advance(row.num_shards)


def _join(batch: Batch, store: CacheStore, compression: str) -> Batch:
    rows = rows_of(batch, GroupRow)
    for row in rows:
        join(store, [store.read_marker(name) for name in row.shards], compression)
    return batch_of([JoinedRow(len(row.shards)) for row in rows])
