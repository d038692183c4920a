"""Verifies a cache against its manifest: checks every file, and reads and hashes every shard and part.

Problems are expected here: they are collected and named, and damaged files are uncommitted on request, so that the
caching command rewrites them. `moray.activations.maintenance.recheck` checks whether the values are the target's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from moray.activations.format.channels import CHANNELS_FILE, channels_fingerprint, read_channels
from moray.activations.format.manifest import Manifest, read_manifest
from moray.activations.format.records import PlanRecord
from moray.activations.format.scan import CacheScan, find_parts, scan
from moray.activations.format.schema import read_description
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import unfinished_addition
from moray.errors import DamagedError, DataError, UnreachableError


@dataclass
class Findings:
    """Problems of a cache, as names and reasons; all empty if there are none."""

    manifest: Manifest | None = None
    num_shards: int = 0
    num_bytes: int = 0
    shards: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    """Problems with plan.json, manifest.json and channels.parquet."""

    @property
    def lines(self) -> list[str]:
        """One line per problem."""
        return [
            *self.other,
            *(f"shard 'shards/{name}.parquet': {reason}" for name, reason in sorted(self.shards.items())),
            *(f"part 'tokens/{name}.parquet': {reason}" for name, reason in sorted(self.parts.items())),
        ]


def verify_files(
    store: CacheStore, threads: int, start: Callable[[int], None], advance: Callable[[int], None]
) -> Findings:
    """Check plan, manifest, parts and markers against each other, and hash every shard and part in bounded memory.

    Args:
        store: the cache.
        threads: number of files to read in parallel.
        start: called with the number of bytes to read.
        advance: called with the number of bytes that have been read.

    Raises:
        DataError: there is no cache, or the store is unreachable.
    """
    if not store.exists("plan.json") and not store.exists("manifest.json"):
        raise DataError(f"activation cache '{store.uri}' is not there: check the path or URI")
    found, parts = scan(store), find_parts(store)
    findings = Findings(num_shards=len(found.counting), shards=dict(found.damaged), parts=dict(parts.damaged))
    _check_manifest(store, found, findings)
    _check_channels(store, found, findings)
    digests = {f"shards/{info.name}.parquet": (info.sha256, info.bytes) for info in found.counting.values()}
    digests |= {f"tokens/{name}.parquet": (part.sha256, part.bytes) for name, part in parts.whole.items()}
    findings.num_bytes = sum(num_bytes for _, num_bytes in digests.values())
    start(findings.num_bytes)

    def check(name: str) -> str:
        try:
            same = store.sha256(name) == digests[name][0]
        except FileNotFoundError:
            return "it has just vanished"
        finally:
            advance(digests[name][1])
        return "" if same else "its content is not what was written (sha256)"

    with ThreadPoolExecutor(threads) as pool:
        for name, reason in zip(digests, pool.map(check, digests), strict=True):
            if reason:
                group = findings.shards if name.startswith("shards/") else findings.parts
                group[name.partition("/")[2].removesuffix(".parquet")] = reason
    return findings


def _check_channels(store: CacheStore, found: CacheScan, findings: Findings) -> None:
    """Check that quantised columns are decoded with the channels that encoded them."""
    for name in sorted(found.counting)[:1]:  # all shards were written with the same channels
        try:
            with store.open_shard(name) as shard:
                described = read_description(shard.schema_arrow)
            channels = read_channels(store, described.columns)
            if channels_fingerprint(channels) != described.channels:
                findings.other.append(f"{CHANNELS_FILE} is not the one that shards were written with: put that back")
        except UnreachableError:
            raise
        except DataError as error:  # a shard that cannot be opened also fails the hash check
            if name not in findings.shards and not str(error).startswith("shard "):
                findings.other.append(str(error))


def _check_manifest(store: CacheStore, found: CacheScan, findings: Findings) -> None:
    try:
        plan = store.read_record("plan.json", PlanRecord)
    except DamagedError as error:
        findings.other.append(str(error).partition(";")[0])
        plan = None
    if not store.exists("manifest.json"):
        findings.other.append("manifest.json is not there: the cache is unfinished, run pipelines.cache_activations")
        return
    try:
        findings.manifest = manifest = read_manifest(store)
    except DamagedError as error:
        findings.other.append(str(error).partition(";")[0])
        return
    unfinished = unfinished_addition(store)
    if unfinished is not None:
        findings.other.append(unfinished)
    elif plan is not None and plan.values != manifest.plan.values:
        findings.other.append("plan.json is not the plan that manifest.json holds")
    covered = {name for info in found.counting.values() for name in info.planned}
    for name, info in manifest.shards.items():
        if name in found.damaged or found.counting.get(name) == info or found.superseded.get(name) == info:
            continue
        if unfinished is not None and name in found.counting:  # it already has the new columns
            continue
        listed = "its marker and manifest.json differ" if name in found.counting else "it is missing"
        findings.shards[name] = listed
    # After a killed compaction, old and joined shards both exist, and the manifest still names the old ones.
    named = {name for info in manifest.shards.values() for name in info.planned}
    for name, info in found.counting.items():
        if not info.planned <= named:
            findings.other.append(f"shard 'shards/{name}.parquet' is committed, but manifest.json does not name it")
    if covered - named or named - covered - set(findings.shards):
        findings.other.append("manifest.json and the markers do not name the same chats")


def repair(store: CacheStore, findings: Findings) -> int:
    """Uncommit damaged shards and parts; return how many. The next caching run updates the plan and the manifest."""
    for name in findings.shards:
        store.uncommit(name)
    for name in findings.parts:
        store.delete(f"tokens/{name}.json")
        store.delete(f"tokens/{name}.parquet")
    return len(findings.shards) + len(findings.parts)
