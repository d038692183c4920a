"""Configures the commands for an existing cache (verify, stats, compact), which accept the caching command's YAML."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from moray.activations.format.schema import CacheConfig
from moray.activations.maintenance.configs import VerifyConfig
from moray.activations.planning.adding import override_words
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.configs import RayConfig
from moray.commands import AnyConfig, Command
from moray.config import Config
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig


class ExistingCache(Config):
    """Existing cache to use. The other keys of the caching command are accepted so that its YAML files work, too."""

    output: str
    """Folder or URI of the activation cache."""
    target: TargetConfig | None = None
    """Target that runs a sample again; null for the one that the cache's run.yaml names."""
    chats: ChatsConfig | None = None
    """Chats that the caching command reads, used only in advice; null for those in run.yaml."""
    cache: CacheConfig = CacheConfig()
    capture: CaptureConfig = CaptureConfig()
    ray: RayConfig = RayConfig()


class VerifyCacheConfig(ExistingCache):
    """Settings of `verify`."""

    verify: VerifyConfig = VerifyConfig()


class CacheStatisticsConfig(ExistingCache):
    """Settings of `stats`."""

    batch_tokens: int = Field(default=16384, ge=1)
    """Maximum tokens per training batch, padding included, for computing the padding of an epoch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class CompactCacheConfig(ExistingCache):
    """Settings of `compact`."""

    shard_mib: int | None = Field(default=None, ge=1)
    """Maximum size of a joined shard in MiB; null for the size with which the cache was planned."""
    num_tasks: int = Field(default=2, ge=1)
    """Number of shards to write in parallel."""


@dataclass(frozen=True)
class CacheCommand(Command[AnyConfig]):
    """Command that accepts the path or URI of a cache in place of YAML files."""

    @property
    def usage(self) -> str:
        """Arguments to show after the command's name."""
        return f"OUTPUT | {super().usage}"

    def load(self, words: Sequence[str], name: str = "", description: str = "") -> AnyConfig:
        """Parse the arguments after the command's name."""
        pairs = zip(["", *words], words, strict=False)
        settings = [
            f"output={json.dumps(word)}" if _is_place(word) and before != "--json" else word for before, word in pairs
        ]
        return super().load(settings, name, description)


def _is_place(word: str) -> bool:
    """Return whether a word is the path or URI of a cache: not an option, a YAML or JSON file, or an override (whose
    key has no slash)."""
    if word.startswith("-") or word.endswith((".yaml", ".yml", ".json")):
        return False
    return "=" not in word or "/" in word.partition("=")[0]


def caching_command(settings: dict[str, object]) -> str:
    """Return the command line that completes a cache with these settings (those that differ from the defaults)."""
    return shlex.join(["python", "-m", "pipelines.cache_activations", *override_words(settings)])
