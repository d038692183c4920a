"""Cache a target's activations over a set of chats, on Ray Data.

    python -m pipelines.cache_activations configs/targets/demo.yaml configs/activations/demo.yaml

Killed at any instant, the same command goes on where it was.
"""

from moray.activations.schema import CacheConfig
from moray.activations.ultrachat import ChatsConfig
from moray.cluster.configs import CaptureConfig, RayConfig
from moray.config import Config, run_entry_point
from moray.targets.spec import TargetConfig


class CacheActivationsConfig(Config):
    """Everything `pipelines.cache_activations` can be told."""

    target: TargetConfig
    chats: ChatsConfig
    output: str
    """Folder or URI of the activation cache."""
    cache: CacheConfig = CacheConfig()
    capture: CaptureConfig = CaptureConfig()
    ray: RayConfig = RayConfig()


def main(config: CacheActivationsConfig) -> None:
    """Make or complete the cache and say what is in it."""
    from moray.cluster.session import ray_session

    with ray_session(config.ray):
        from moray.activations.store import CacheStore
        from moray.cluster.capture import cache_activations
        from moray.provenance import run_yaml

        manifest = cache_activations(config.output, config.target, config.chats, config.cache, config.capture)
        target = {"target": manifest.plan["target"]["fingerprint"], "text": manifest.plan["text_fingerprint"]}
        CacheStore(config.output).write_text("run.yaml", run_yaml(config, fingerprints=target))
    rows = sum(shard.rows for shard in manifest.shards.values())
    size = sum(shard.bytes for shard in manifest.shards.values())
    contents = f"{rows:,} chats, {manifest.num_tokens:,} tokens, {len(manifest.shards)} shards, {size:,} bytes"
    print(f"{config.output}: {contents}")


CONFIG = CacheActivationsConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
