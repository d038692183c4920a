"""Adds columns to a cache on Ray Data: each actor holds one target and rewrites shard after shard."""

from collections.abc import Iterator
from dataclasses import replace

import ray.data

from moray.activations.capture.extend import ShardExtender
from moray.activations.format.scan import scan
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import Addition, begin_addition, check_addition_fits, is_begun, plan_addition
from moray.activations.planning.cache_spec import FORECAST_FILE, CachePlan, CacheSpec
from moray.activations.planning.measure import measure_disk_space
from moray.activations.planning.plan import count_work, forecast
from moray.cluster.caching.calibration import calibration, forget_calibration
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.caching.disk_full import Goal
from moray.cluster.caching.rows import Batch, ShardRow, TokensRow, dataset_of, rows_from, rows_of, token_rows
from moray.cluster.lost_ranks import exit_on_lost_rank
from moray.progress import Progress
from moray.targets.spec import TargetConfig


def add_columns(
    store: CacheStore, wanted: CacheSpec, planned: CachePlan, added: list[str], capture: CaptureConfig, goal: Goal
) -> None:
    """Add the missing columns to the existing shards.

    It may be killed at any time; the same call resumes it. Until it is done, the cache can be read with its old
    columns.

    Args:
        store: the cache.
        wanted: requested contents of the cache.
        planned: the cache's shards as they were cut.
        added: columns that the cache's plan does not name yet.
        capture: number and resources of the targets.
        goal: receives the expected size of the cache.

    Raises:
        ConfigError: there is not enough space; nothing has been changed.
        DataError: a shard is damaged, or activations are not finite.
    """
    plan, found = wanted.plan(), scan(store)
    missing = sum(tokens for name, tokens in planned.tokens_of.items() if name not in found.planned)
    addition = plan_addition(store, plan, added, found.counting, missing)
    disk = measure_disk_space(store, wanted.cache)
    num_targets = min(capture.num_targets, max(1, len(addition.shards)))
    check_addition_fits(addition, replace(disk, reserve=disk.reserve + addition.largest * num_targets), store.uri)
    goal.total = disk.written + addition.bytes
    if not is_begun(store, plan, added):
        forget_calibration(store)  # it describes only the old columns
        calibrated = calibration(store, wanted, planned, capture)
        work = count_work(planned.shards, planned.lengths, wanted.rows)
        whole = forecast(wanted.spec, wanted.cache, work, len(planned.shards))
        whole = replace(whole, tokens_per_second=calibrated.tokens_per_second)
        store.write_json(FORECAST_FILE, whole.record(disk, capture.num_targets).values)
        begin_addition(store, plan, added)
    print(addition.announcement)
    _extend_all(store, addition, wanted, capture)


class _ExtendActor:
    """Holds one target replica and extends shards with it."""

    def __init__(self, store: CacheStore, target: TargetConfig, cache: CacheConfig, threads: int) -> None:
        import torch

        from moray.targets.model import Target

        torch.set_num_threads(threads)
        self._store = store
        self._extender = ShardExtender(Target.load(target, packs=False), store, cache)

    def __call__(self, batch: Batch) -> Iterator[Batch]:
        with exit_on_lost_rank():
            for row in rows_of(batch, ShardRow):
                num_batches = len(self._store.read_marker(row.shard).row_groups)
                yield from token_rows(self._extender.extend_in_batches(row.shard), num_batches)


def _extend_all(store: CacheStore, addition: Addition, wanted: CacheSpec, capture: CaptureConfig) -> None:
    rows = [ShardRow(name) for name in addition.shards]
    if not rows:
        return
    dataset = dataset_of(rows).map_batches(
        _ExtendActor,
        fn_constructor_args=(store, wanted.target, wanted.cache, capture.threads_per_target),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(capture.num_targets, len(rows))),
        num_cpus=capture.cpus_per_target,
        num_gpus=capture.gpus_per_target,
    )
    finished = addition.tokens - addition.tokens_left
    with Progress("add columns", addition.tokens, done=finished, unit="tokens") as progress:
        for row in rows_from(dataset, TokensRow):
            progress.advance(row.tokens)
