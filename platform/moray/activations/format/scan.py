"""Finds the complete shards of a cache by comparing each marker with the file's size. Opens no shard.

A planned shard can temporarily exist twice, because compaction deletes the old shards last. Only the larger one then
counts, so that at any time each chat is in exactly one shard that counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from moray.activations.format.records import PartSummary
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.activations.format.threads import in_threads
from moray.errors import DamagedError


@dataclass(frozen=True)
class CacheScan:
    """Shards of a cache, by name."""

    counting: dict[str, ShardInfo]
    superseded: dict[str, ShardInfo]
    """Complete shards whose chats are also in a compacted shard."""
    damaged: dict[str, str]
    """Reason for each damaged shard that has a marker, by name."""

    @property
    def planned(self) -> frozenset[str]:
        """Names of the planned shards whose chats are stored."""
        return frozenset(name for info in self.counting.values() for name in info.planned)


def scan(store: CacheStore) -> CacheScan:
    """Compare every marker with its shard's size, using one listing and reading markers in parallel."""
    sizes = store.sizes("shards")
    names = sorted(name[:-5] for name in sizes if name.endswith(".json"))

    def look(name: str) -> ShardInfo | str:
        try:
            info = store.read_marker(name)
        except DamagedError:  # an unreachable store is not damage
            return "its marker is damaged"
        size = sizes.get(f"{name}.parquet")
        if size is None:
            return "it is missing"
        return info if size == info.bytes else f"it has {size:,} bytes, its marker says {info.bytes:,}"

    found = dict(zip(names, in_threads(look, names), strict=True))
    whole = [info for info in found.values() if isinstance(info, ShardInfo)]
    counting = _counting(whole)
    return CacheScan(
        counting,
        {info.name: info for info in whole if info.name not in counting},
        {name: reason for name, reason in found.items() if isinstance(reason, str)},
    )


def _counting(shards: Iterable[ShardInfo]) -> dict[str, ShardInfo]:
    taken: set[str] = set()
    chosen: dict[str, ShardInfo] = {}
    for info in sorted(shards, key=lambda info: (-len(info.planned), info.name)):
        if taken.isdisjoint(info.planned):
            chosen[info.name] = info
            taken |= info.planned
    return {name: chosen[name] for name in sorted(chosen)}


def remove_damaged(store: CacheStore, found: CacheScan) -> None:
    """Uncommit damaged shards and print why; the caching command then rewrites only these."""
    for name, reason in found.damaged.items():
        print(f"shard 'shards/{name}.parquet' is damaged: {reason}; it will be made again")
        store.uncommit(name)


@dataclass(frozen=True)
class Parts:
    """Tokenised parts of a cache, by name."""

    whole: dict[str, PartSummary]
    """Summary of each complete part, from its JSON file."""
    damaged: dict[str, str]
    """Reason for each damaged or missing part, by name."""


def find_parts(store: CacheStore, num_expected: int = 0) -> Parts:
    """Compare every part's size with its summary, using one listing.

    Args:
        store: the cache.
        num_expected: minimum number of parts: one that is missing without a trace counts as damaged.
    """
    sizes = store.sizes("tokens")
    names = sorted(
        {name[:-5] for name in sizes if name.endswith(".json")} | {f"part-{i:05d}" for i in range(num_expected)}
    )

    def look(name: str) -> PartSummary | str:
        try:
            summary = store.read_record(f"tokens/{name}.json", PartSummary)
        except DamagedError as error:
            return "it is missing" if "is missing" in str(error) else "what is noted of it is damaged"
        if summary.name != name:
            return "what is noted of it is damaged"
        size = sizes.get(f"{name}.parquet")
        if size is None:
            return "it is missing"
        return summary if size == summary.bytes else f"it has {size:,} bytes, noted are {summary.bytes:,}"

    found = dict(zip(names, in_threads(look, names), strict=True))
    return Parts(
        {name: value for name, value in found.items() if isinstance(value, PartSummary)},
        {name: value for name, value in found.items() if isinstance(value, str)},
    )
