"""Builds the activation cache on Ray Data: chats -> tokenised parts -> shards of activations.

There are two streaming stages, with planning in between. Parts hold only tokens (4 bytes each), so the exact number of
tokens, shards and bytes is known before the target runs: a cache that does not fit is refused, chats of similar length
share a batch, and a resumed job knows which shards are missing.
"""

from collections.abc import Iterator
from dataclasses import replace

import ray.data

from moray.activations.capture.extract import ShardWriter
from moray.activations.format.channels import CHANNELS_FILE, read_channels
from moray.activations.format.manifest import LAYOUT_FILE, Manifest, read_manifest, write_layout, write_manifest
from moray.activations.format.records import PlanRecord
from moray.activations.format.scan import CacheScan, find_parts, remove_damaged, scan
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import columns_to_add, end_addition, extended_plan, finish_replaced
from moray.activations.planning.cache_spec import FORECAST_FILE, CachePlan, CacheSpec
from moray.activations.planning.measure import measure_disk_space
from moray.activations.planning.plan import check_fits, count_work, forecast
from moray.cluster.caching.calibration import calibration, forget_calibration
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.caching.disk_full import Goal, cache_full_errors
from moray.cluster.caching.extend import add_columns
from moray.cluster.caching.rows import Batch, ShardPlanRow, TokensRow, dataset_of, rows_from, rows_of, token_rows
from moray.cluster.caching.tokenise import tokenise
from moray.cluster.errors import own_errors
from moray.cluster.lost_ranks import exit_on_lost_rank
from moray.data.ultrachat import ChatsConfig
from moray.errors import ConfigError, DamagedError
from moray.progress import Progress
from moray.targets.spec import TargetConfig


def cache_activations(
    output: str, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, capture: CaptureConfig
) -> Manifest:
    """Create or complete the activation cache at `output`, or add columns to it. Needs a Ray session.

    Raises:
        ConfigError: the cache does not fit; nothing has been cached.
        MismatchError: a different cache is at `output`.
        DataError: too many bad rows, or activations that are not finite.
        StorageFullError: the disk is full; the same command resumes once there is space.
    """
    store = CacheStore(output)
    wanted = CacheSpec.of(target, chats, cache)
    wanted.check_disk_space(store)
    with cache_full_errors(store) as goal:
        added = _begin_or_resume(store, wanted)
        found = scan(store)
        remove_damaged(store, found)
        if not added and (whole := _whole_manifest(store, wanted, found)) is not None:
            end_addition(store, wanted.plan())
            return whole
        with own_errors():
            counts = tokenise(store, target, wanted.chunks, chats.max_bad_rows, wanted.max_length, capture)
            planned = CachePlan.of(store, cache)
            if added:
                add_columns(store, wanted, planned, added, capture, goal)
            _check_and_announce(store, wanted, planned, capture, goal)
            _run_target(store, target, cache, capture, planned)
        if added:
            _replace_plan(store, extended_plan(store, wanted.plan()))
        store.clear_temporary()  # left by target replicas that died
        manifest = write_manifest(store, counts)
        end_addition(store, wanted.plan())
        return manifest


def lay_out_cache(
    output: str, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, capture: CaptureConfig, is_kept: bool
) -> None:
    """Tokenise and plan a cache whose activations are computed during training. Needs a Ray session.

    Args:
        output: folder or URI of the plan and tokens, and of the shards if they are kept.
        target: target whose activations are computed.
        chats: chats to tokenise.
        cache: taps to compute, and their codecs, which also encode them on the way to a trainer.
        capture: resources of the tokenisers and of the calibration pass.
        is_kept: whether shards will be written and must therefore fit.

    Raises:
        As `cache_activations`.
    """
    store = CacheStore(output)
    wanted = CacheSpec.of(target, chats, cache)
    if is_kept:
        wanted.check_disk_space(store)
    with cache_full_errors(store) as goal, own_errors():
        store.begin_or_resume(wanted.plan().values)
        finish_replaced(store)
        remove_damaged(store, scan(store))
        if store.exists(LAYOUT_FILE) and not find_parts(store, len(wanted.chunks)).damaged:
            return
        counts = tokenise(store, target, wanted.chunks, chats.max_bad_rows, wanted.max_length, capture)
        planned = CachePlan.of(store, cache)
        if is_kept:
            _check_and_announce(store, wanted, planned, capture, goal)
        row_groups = {
            plan.name: [[planned.lengths[plan.part][row] for row in batch] for batch in plan.batches]
            for plan in planned.shards
        }
        write_layout(store, row_groups, calibration(store, wanted, planned, capture).hidden_rms, counts)


def _whole_manifest(store: CacheStore, wanted: CacheSpec, found: CacheScan) -> Manifest | None:
    """Return the manifest of a complete cache; None if anything is missing."""
    if found.damaged or not store.exists("manifest.json"):
        return None
    try:
        manifest = read_manifest(store)
    except DamagedError:
        print(f"'{store.uri}/manifest.json' is damaged: it will be written again")
        return None
    has_all_shards = manifest.plan.values == store.read_plan().values and manifest.shards == found.counting
    has_all_parts = not find_parts(store, len(wanted.chunks)).damaged
    return manifest if has_all_shards and has_all_parts else None


def _replace_plan(store: CacheStore, plan: PlanRecord) -> None:
    """Replace the plan with the one that has the new columns, once all shards have them."""
    for name in (LAYOUT_FILE, "run.yaml"):  # they describe the old columns; the caller writes another run.yaml
        store.delete(name)
    store.write_json("plan.json", plan.values)


def _begin_or_resume(store: CacheStore, wanted: CacheSpec) -> list[str]:
    """Begin or resume a cache; return the columns to add to it.

    Raises:
        MismatchError: a different cache is there.
    """
    added = columns_to_add(store, wanted.plan().values)
    if added:
        store.clear_temporary()
    else:
        store.begin_or_resume(wanted.plan().values)
    finish_replaced(store)
    return added


def _check_and_announce(
    store: CacheStore, wanted: CacheSpec, planned: CachePlan, capture: CaptureConfig, goal: Goal
) -> None:
    """Between the stages: refuse a cache that does not fit, run the calibration pass, and print the forecast.

    Raises:
        ConfigError: the disk or `cache.max_bytes` is too small; a cache without shards is deleted, so that the advice
            in the message can be followed with the same output.
    """
    cache = wanted.cache
    work = count_work(planned.shards, planned.lengths, wanted.rows)
    plan = forecast(wanted.spec, cache, work, len(planned.shards))
    committed = scan(store).planned
    if planned.tokens_of.keys() <= committed:
        return
    disk = measure_disk_space(store, cache)
    if not committed:  # there is only text, which can be recreated
        disk = replace(disk, written=0)
    try:
        check_fits(wanted.spec, cache, plan, disk, store.uri)
    except ConfigError:
        if not committed:
            _remove_text(store)
        raise
    goal.total = plan.total
    if committed:
        # Raises if the channels are lost: new ones would not match the existing shards.
        read_channels(store, wanted.columns)
    is_new = not store.exists(FORECAST_FILE)
    plan = replace(plan, tokens_per_second=calibration(store, wanted, planned, capture).tokens_per_second)
    if is_new:
        store.write_json(FORECAST_FILE, plan.record(disk, capture.num_targets).values)
    print("\n".join(plan.lines(disk, capture.num_targets)))


def _remove_text(store: CacheStore) -> None:
    """Delete a cache that has no shards yet."""
    store.filesystem.delete_dir(store.path("tokens"))
    forget_calibration(store)
    for name in (FORECAST_FILE, CHANNELS_FILE, "plan.json"):
        store.delete(name)


class _ShardActor:
    """Holds one target replica and writes shards with it."""

    def __init__(self, store: CacheStore, target: TargetConfig, cache: CacheConfig, threads: int) -> None:
        import torch

        from moray.targets.model import Target

        torch.set_num_threads(threads)
        self._writer = ShardWriter(Target.load(target, packs=False), store, cache)

    def __call__(self, batch: Batch) -> Iterator[Batch]:
        with exit_on_lost_rank():
            for row in rows_of(batch, ShardPlanRow):
                yield from token_rows(self._writer.write_in_batches(row.plan), len(row.plan.batches))


def _run_target(
    store: CacheStore,
    target: TargetConfig,
    cache: CacheConfig,
    capture: CaptureConfig,
    planned: CachePlan,
) -> None:
    """Stage 2: write the missing shards."""
    done = scan(store).planned
    missing = [ShardPlanRow(plan) for plan in planned.shards if plan.name not in done]
    if not missing:
        return
    dataset = dataset_of(missing).map_batches(
        _ShardActor,
        fn_constructor_args=(store, target, cache, capture.threads_per_target),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(capture.num_targets, len(missing))),
        num_cpus=capture.cpus_per_target,
        num_gpus=capture.gpus_per_target,
    )
    tokens_of = planned.tokens_of
    finished = sum(tokens_of[name] for name in done if name in tokens_of)
    with Progress("cache", sum(tokens_of.values()), done=finished, unit="tokens") as progress:
        for row in rows_from(dataset, TokensRow):
            progress.advance(row.tokens)
