"""The manifest of a complete cache: what a reader needs to know before it opens a shard."""

import math
from dataclasses import dataclass
from typing import Any

from moray.activations.schema import FORMAT
from moray.activations.store import CacheStore, ShardInfo
from moray.errors import DataError


@dataclass(frozen=True)
class Manifest:
    """A complete cache: its plan (fingerprints, columns), shards and statistics."""

    plan: dict[str, Any]
    shards: dict[str, ShardInfo]
    hidden_rms: dict[int, float]
    """Root mean square of the hidden states, by depth."""

    @property
    def columns(self) -> dict[str, Any]:
        """Codec and width by tap column."""
        return self.plan["columns"]

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards.values())

    @property
    def lengths(self) -> dict[str, list[list[int]]]:
        """Chat lengths by shard and row group: what epochs are planned from."""
        return {name: shard.row_groups for name, shard in self.shards.items()}


def write_manifest(store: CacheStore, counts: dict[str, int]) -> Manifest:
    """Close a cache whose shards are all committed.

    Args:
        store: the cache.
        counts: chats read, dropped and bad, as reported by the tokenising stage.
    """
    shards = store.committed()
    tokens = sum(shard.tokens for shard in shards.values())
    names = {name for shard in shards.values() for name in shard.hidden_square_sums}
    rms = {
        name: math.sqrt(sum(s.hidden_square_sums[name] for s in shards.values()) / max(1, tokens))
        for name in sorted(names)
    }
    totals = {
        "shards": len(shards),
        "rows": sum(shard.rows for shard in shards.values()),
        "tokens": tokens,
        "bytes": sum(shard.bytes for shard in shards.values()),
    }
    store.write_json(
        "manifest.json",
        {
            "format": FORMAT,
            "plan": store.read_json("plan.json"),
            "totals": totals,
            "chats": counts,
            "hidden_rms": rms,
            "shards": [shard.__dict__ for shard in shards.values()],
        },
    )
    return read_manifest(store)


def read_manifest(store: CacheStore) -> Manifest:
    """Open a complete cache.

    Raises:
        DataError: there is none, it is not complete, or it was written by a newer version.
    """
    if not store.exists("manifest.json"):
        state = "unfinished" if store.exists("plan.json") else "not there"
        raise DataError(f"activation cache '{store.uri}' is {state}: run pipelines.cache_activations with this output")
    values = store.read_json("manifest.json")
    if values.get("format") != FORMAT:
        raise DataError(f"'{store.uri}' has format {values.get('format')}; this version reads {FORMAT}")
    shards = {shard["name"]: ShardInfo(**shard) for shard in values["shards"]}
    rms = {int(name.split(".", 1)[1]): value for name, value in values["hidden_rms"].items()}
    return Manifest(values["plan"], shards, rms)
