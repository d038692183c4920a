"""Specifies a cache before any of it is read (`CacheSpec`) and after its chats are tokenised (`CachePlan`)."""

from dataclasses import dataclass
from functools import cached_property

from moray.activations.format.records import PlanRecord, shard_token_bytes
from moray.activations.format.scan import find_parts
from moray.activations.format.schema import FORMAT, CacheConfig, Column, column_values
from moray.activations.format.store import CacheStore
from moray.activations.planning.measure import measure_disk_space
from moray.activations.planning.plan import check_fits, forecast
from moray.activations.planning.sample import project, sample_chats
from moray.activations.planning.shards import ShardPlan, plan_shards, tap_columns
from moray.data.ultrachat import ChatChunk, ChatsConfig, plan_chunks
from moray.special_tokens import CONTENT_RULE
from moray.targets.spec import TargetConfig, TargetSpec, read_spec
from moray.text import ChatTokenizer

FORECAST_FILE = "forecast.json"


@dataclass(frozen=True)
class CacheSpec:
    """Requested contents of a cache, before any of it is read."""

    target: TargetConfig
    spec: TargetSpec
    tokenizer: ChatTokenizer
    chats: ChatsConfig
    chunks: list[ChatChunk]
    cache: CacheConfig
    columns: dict[str, Column]

    @classmethod
    def of(
        cls, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, needs_weights: bool = True
    ) -> "CacheSpec":
        """Read the target's configuration and tokenizer, and divide the chat files into chunks.

        Raises:
            ConfigError: one of them cannot be read, or the target lacks a requested layer or depth.
        """
        spec = read_spec(target.model, needs_weights=needs_weights)
        tokenizer = ChatTokenizer.load(target.model, target.template)
        chunks = plan_chunks(chats, cache.chats_per_part)
        return cls(target, spec, tokenizer, chats, chunks, cache, tap_columns(spec, cache))

    @property
    def rows(self) -> int:
        """Number of chats, bad ones included."""
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def max_length(self) -> int:
        """Maximum tokens per chat: `cache.max_length`, but never more than the target's context."""
        return min(self.cache.max_length, self.spec.max_positions)

    def plan(self) -> PlanRecord:
        """Return everything that determines the contents of the cache. A different plan means a different cache."""
        values = {
            "format": FORMAT,
            "target": self.spec.for_plan,
            "dtype": self.target.dtype,
            "text_fingerprint": self.tokenizer.fingerprint,
            "content_rule": CONTENT_RULE,
            "chats": self.chats.model_dump(mode="json", exclude={"max_bad_rows"}),
            "files": {chunk.label: chunk.file_bytes for chunk in self.chunks},
            "cache": self.cache.for_plan,
            "columns": column_values(self.columns),
        }
        return PlanRecord.of(values)  # from values, so that keys missing there stay unset

    def check_disk_space(self, store: CacheStore) -> None:
        """Refuse a cache that will not fit, judging by a sample of chats; the exact check follows after tokenising.

        Raises:
            ConfigError: the cache does not exist yet, and it does not fit.
        """
        if not store.exists("plan.json"):
            work = project(sample_chats(self.chunks, self.tokenizer, self.max_length), self.rows, self.cache)
            disk = measure_disk_space(store, self.cache)
            check_fits(self.spec, self.cache, forecast(self.spec, self.cache, work), disk, store.uri)


@dataclass(frozen=True)
class CachePlan:
    """All planned shards of a tokenised cache, and the chat lengths of every part."""

    shards: list[ShardPlan]
    lengths: dict[str, list[int]]

    @classmethod
    def of(cls, store: CacheStore, cache: CacheConfig) -> "CachePlan":
        """Plan the shards of all tokenised parts of a cache, deterministically. The cache must have a plan."""
        lengths = {part: summary.lengths for part, summary in find_parts(store).whole.items()}
        token_bytes = shard_token_bytes(store.read_plan())
        shards = [
            plan
            for part, part_lengths in lengths.items()
            for plan in plan_shards(part, part_lengths, cache, token_bytes)
        ]
        return cls(shards, lengths)

    @cached_property
    def tokens_of(self) -> dict[str, int]:
        """Number of tokens, by shard."""
        return {
            plan.name: sum(self.lengths[plan.part][row] for rows in plan.batches for row in rows)
            for plan in self.shards
        }
