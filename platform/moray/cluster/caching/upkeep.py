"""The commands about a cache that is there: verify, stats, compact. They take the caching command's YAML files."""

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
    """Which cache; the other keys of the caching command are there so that its YAML files serve here, too."""

    output: str
    """Folder or URI of the activation cache."""
    target: TargetConfig | None = None
    """Target for a sample that is run again; null for the one that the cache's run.yaml names."""
    chats: ChatsConfig | None = None
    """Chats that the caching command reads, named in advice only; null for those in run.yaml."""
    cache: CacheConfig = CacheConfig()
    capture: CaptureConfig = CaptureConfig()
    ray: RayConfig = RayConfig()


class VerifyCacheConfig(ExistingCache):
    """What `verify` can be told."""

    verify: VerifyConfig = VerifyConfig()


class CacheStatisticsConfig(ExistingCache):
    """What `stats` can be told."""

    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens of a training batch, padding included, for the padding of an epoch."""
    report: str | None = None
    """JSON file to write, the same as --json FILE; null for none."""


class CompactCacheConfig(ExistingCache):
    """What `compact` can be told."""

    shard_mib: int | None = Field(default=None, ge=1)
    """Largest size of a joined shard in MiB; null for the size that the cache was planned with."""
    num_tasks: int = Field(default=2, ge=1)
    """Shards that are written at once."""


@dataclass(frozen=True)
class CacheCommand(Command[AnyConfig]):
    """A command whose first word may be the cache itself, in place of YAML files."""

    @property
    def usage(self) -> str:
        """What stands behind the command's name."""
        return f"OUTPUT | {super().usage}"

    def load(self, words: Sequence[str], name: str = "", description: str = "") -> AnyConfig:
        """Read the words behind the command's name."""
        pairs = zip(["", *words], words, strict=False)
        settings = [
            f"output={json.dumps(word)}" if _is_place(word) and before != "--json" else word for before, word in pairs
        ]
        return super().load(settings, name, description)


def _is_place(word: str) -> bool:
    """A path or URI of a cache: no option, no YAML file, no override (a key has no slash)."""
    if word.startswith("-") or word.endswith((".yaml", ".yml", ".json")):
        return False
    return "=" not in word or "/" in word.partition("=")[0]


def caching_command(settings: dict[str, object]) -> str:
    """The command line that completes a cache of these settings (those that differ from the defaults)."""
    return shlex.join(["python", "-m", "pipelines.cache_activations", *override_words(settings)])
