"""Cache a target's activations over a set of chats, on Ray Data.

    python -m pipelines.cache_activations configs/targets/demo.yaml configs/activations/demo.yaml

If the command is killed or runs out of disk space, run it again: it resumes where it stopped. `plan` estimates tokens,
bytes and hours without writing anything; `verify`, `stats` and `compact` work on an existing cache:

    python -m pipelines.cache_activations plan configs/targets/demo.yaml configs/activations/demo.yaml
    python -m pipelines.cache_activations verify runs/demo/activations verify.sample_chats=4
    python -m pipelines.cache_activations stats runs/demo/activations --json runs/stats.json
    python -m pipelines.cache_activations compact runs/demo/activations shard_mib=512

If you ask for more columns than the cache has, the missing ones are added shard by shard and the rest stays as it is:

    python -m pipelines.cache_activations target.model=MODEL chats.path=CHATS output=runs/mine/activations \\
        'cache.hidden_depths=[-1,-2,-3,-4]'

`verify` hashes every shard and names the damaged ones. With verify.repair=true it also removes them, so that the
caching command writes them again. `compact` must not run while a drafter trains from the cache.
"""

import sys
from typing import Any

from moray.activations.format.schema import CacheConfig
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.caching.upkeep import CacheCommand, CacheStatisticsConfig, CompactCacheConfig, VerifyCacheConfig
from moray.cluster.configs import RayConfig
from moray.commands import Command, run_commands
from moray.config import Config
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig


class CacheActivationsConfig(Config):
    """Configuration of `pipelines.cache_activations`."""

    target: TargetConfig
    chats: ChatsConfig
    output: str
    """Folder or URI of the activation cache."""
    cache: CacheConfig = CacheConfig()
    capture: CaptureConfig = CaptureConfig()
    ray: RayConfig = RayConfig()


def main(config: CacheActivationsConfig) -> None:
    """Create or complete the cache and print what it holds."""
    from moray.activations.format.store import CacheStore
    from moray.cluster.session import ray_session
    from moray.data.ultrachat import check_files
    from moray.models import check_path

    CacheStore(config.output).check()  # reports a wrong bucket before Ray starts
    check_files(config.chats)  # these two report what is missing
    check_path(config.target.model)
    with ray_session(config.ray):
        from moray.cluster.caching.capture import cache_activations
        from moray.provenance import run_yaml

        store = CacheStore(config.output)
        before = _identity(store)
        manifest = cache_activations(config.output, config.target, config.chats, config.cache, config.capture)
        if before is None or before != _identity(store):  # otherwise an earlier run made it: keep that run's record
            target = {"target": manifest.plan.target.fingerprint, "text": manifest.plan.text_fingerprint}
            store.write_text("run.yaml", run_yaml(config, fingerprints=target))
    rows = sum(shard.rows for shard in manifest.shards.values())
    size = sum(shard.bytes for shard in manifest.shards.values())
    contents = f"{rows:,} chats, {manifest.num_tokens:,} tokens, {len(manifest.shards)} shards, {size:,} bytes"
    print(f"{config.output}: {contents}")


def _identity(store: Any) -> str | None:
    """Hash of the manifest if the cache is complete and has a run.yaml, else None."""
    return store.sha256("manifest.json") if store.exists("manifest.json") and store.exists("run.yaml") else None


def main_plan(config: CacheActivationsConfig) -> None:
    """Estimate tokens, bytes and hours from a sample for every codec; writes nothing."""
    from moray.activations.planning.plan_report import Workers, print_plan
    from moray.console import open_console
    from moray.progress import Progress

    capture = config.capture
    workers = Workers(capture.num_targets, capture.threads_per_target, need_gpu=capture.gpus_per_target > 0)
    with Progress("look at a sample of the chats, and run the target on some"):
        print_plan(config.output, config.target, config.chats, config.cache, workers, open_console())


def main_verify(config: VerifyCacheConfig) -> None:
    """Hash every shard, recompute a sample of chats, name damaged shards and optionally remove them."""
    from moray.cluster.caching.verify import verify_cache

    verify_cache(config)
    print(f"{config.output}: nothing is wrong")


def main_stats(config: CacheStatisticsConfig) -> None:
    """Print what a cache holds: chats, tokens, bytes per token, lengths, padding."""
    from pathlib import Path

    from moray.activations.format.manifest import read_manifest
    from moray.activations.format.store import CacheStore
    from moray.activations.maintenance.figures import cache_statistics, statistics_lines
    from moray.progress import Progress
    from moray.provenance import write_json_atomically

    store = CacheStore(config.output)
    with Progress(f"read what {config.output} holds"):
        figures = cache_statistics(store, read_manifest(store), config.batch_tokens)
    if config.report:
        write_json_atomically(Path(config.report), figures)
    print("\n".join(statistics_lines(figures)))


def main_compact(config: CompactCacheConfig) -> None:
    """Merge small shards into large ones; after a kill, the same command resumes."""
    from moray.activations.format.manifest import read_manifest
    from moray.activations.format.store import CacheStore
    from moray.cluster.session import ray_session

    read_manifest(CacheStore(config.output))  # reports a missing cache before Ray starts
    with ray_session(config.ray):
        from moray.cluster.caching.compact import compact

        before, after = compact(config.output, config.shard_mib, config.num_tasks)
    print(
        f"{config.output}: {before} shards are now {after}" if before != after else f"{config.output}: compact already"
    )


CONFIG = CacheActivationsConfig
_CACHE = Command(CacheActivationsConfig, main)
COMMANDS = {
    "": _CACHE,
    "plan": Command(CacheActivationsConfig, main_plan),
    "verify": CacheCommand(VerifyCacheConfig, main_verify),
    "stats": CacheCommand(CacheStatisticsConfig, main_stats),
    "compact": CacheCommand(CompactCacheConfig, main_compact),
}

if __name__ == "__main__":
    run_commands(COMMANDS, __doc__ or "", sys.argv[1:])
