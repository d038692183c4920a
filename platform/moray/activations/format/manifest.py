"""Writes and reads the manifest of a complete cache, which a reader needs before it opens a shard."""

import math
from dataclasses import dataclass

from moray.activations.format.records import PlanRecord
from moray.activations.format.scan import scan
from moray.activations.format.schema import FORMAT, Column
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.errors import DamagedError, DataError

LAYOUT_FILE = "layout.json"


@dataclass(frozen=True)
class Manifest:
    """Plan (fingerprints, columns), shards and statistics of a complete cache."""

    plan: PlanRecord
    shards: dict[str, ShardInfo]
    hidden_rms: dict[int, float]
    """Root mean square of the hidden states, by depth."""
    chats: dict[str, int]
    """Numbers of chats kept, dropped and bad."""

    @property
    def columns(self) -> dict[str, Column]:
        """Codec and width by tap column."""
        return self.plan.columns

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards.values())

    @property
    def lengths(self) -> dict[str, list[list[int]]]:
        """Chat lengths by shard and row group, from which epochs are planned."""
        return {name: shard.row_groups for name, shard in self.shards.items()}


def write_manifest(store: CacheStore, counts: dict[str, int]) -> Manifest:
    """Write manifest.json for a cache whose shards are all committed.

    Args:
        store: the cache.
        counts: chats kept, dropped and bad, as reported by the tokenising stage.
    """
    plan, shards = store.read_record("plan.json", PlanRecord), scan(store).counting
    tokens = sum(shard.tokens for shard in shards.values())
    # Skip columns that are being added: not all shards have them.
    names = {name for shard in shards.values() for name in shard.hidden_square_sums if name in plan.columns}
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
            "plan": plan.values,
            "totals": totals,
            "chats": counts,
            "hidden_rms": rms,
            "shards": [shard.__dict__ for shard in shards.values()],
        },
    )
    return read_manifest(store)


def write_layout(
    store: CacheStore, row_groups: dict[str, list[list[int]]], hidden_rms: dict[str, float], counts: dict[str, int]
) -> None:
    """Write layout.json for a cache whose shards are computed during training.

    Args:
        store: the tokenised cache; its run.yaml says which run made it.
        row_groups: chat lengths by planned shard and row group.
        hidden_rms: RMS by hidden column, measured on a sample.
        counts: chats kept, dropped and bad.
    """
    shards = [{"name": name, "row_groups": groups} for name, groups in row_groups.items()]
    plan = store.read_record("plan.json", PlanRecord)
    layout = {"format": FORMAT, "plan": plan.values, "chats": counts, "hidden_rms": hidden_rms, "shards": shards}
    store.write_json(LAYOUT_FILE, layout)


def read_layout(store: CacheStore) -> Manifest:
    """Read the layout of a cache whose shards are computed during training; they have neither size nor hash.

    Raises:
        DamagedError: layout.json is missing or damaged.
    """
    values = store.read_json(LAYOUT_FILE)
    try:
        shards = {shard["name"]: _planned_shard(shard["name"], shard["row_groups"]) for shard in values["shards"]}
        plan, rms = PlanRecord.of(values["plan"]), _by_depth(values["hidden_rms"])
    except (KeyError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedError(f"'{store.uri}/{LAYOUT_FILE}' is damaged: {why}; remove it and train again") from None
    return Manifest(plan, shards, rms, values.get("chats", {}))


def _planned_shard(name: str, row_groups: list[list[int]]) -> ShardInfo:
    """Describe a shard of which only the chat lengths are known."""
    rows, tokens = sum(map(len, row_groups)), sum(map(sum, row_groups))
    return ShardInfo(name, rows, tokens, bytes=0, sha256="", row_groups=row_groups, hidden_square_sums={})


def read_manifest(store: CacheStore) -> Manifest:
    """Read the manifest of a complete cache.

    Raises:
        DataError: there is no cache, it is not complete, or this version does not read its format.
        DamagedError: the manifest was truncated or altered.
    """
    if not store.exists("manifest.json"):
        state = "unfinished" if store.exists("plan.json") else "not there"
        raise DataError(f"activation cache '{store.uri}' is {state}: run pipelines.cache_activations with this output")
    values = store.read_json("manifest.json")
    if "format" not in values:
        raise DamagedError(
            f"'{store.uri}/manifest.json' is damaged: it names no format; run pipelines.cache_activations"
        )
    if values["format"] != FORMAT:
        raise DataError(f"'{store.uri}' has format {values.get('format')}; this version reads {FORMAT}")
    try:
        shards = {shard["name"]: ShardInfo(**shard) for shard in values["shards"]}
        plan = PlanRecord.of(values["plan"])
        return Manifest(plan, shards, _by_depth(values["hidden_rms"]), values.get("chats", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(
            f"'{store.uri}/manifest.json' is damaged: {error}; run pipelines.cache_activations again"
        ) from None


def _by_depth(hidden_rms: dict[str, float]) -> dict[int, float]:
    """Convert column names, such as hidden.-2, to depths."""
    return {int(name.split(".", 1)[1]): value for name, value in hidden_rms.items()}
