"""Adds columns to an existing cache: detects that a run asks for it, checks the disk space, and builds the command.

Torch-free. Shards keep their names, chats and row groups; each is rewritten with the bytes of its old columns and the
new ones (`moray.activations.capture.extend`). Until all shards are rewritten, plan and manifest name only the old
columns, and readers, which select columns by name, find those in every shard: the cache stays readable. `adding.json`
records that an addition is in progress; the schema of each shard shows whether it is done.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml
from pydantic import JsonValue

from moray.activations.format.disk_space import DiskSpace, size_text
from moray.activations.format.records import PlanRecord, Record, shard_token_bytes
from moray.activations.format.row_groups import damaged
from moray.activations.format.schema import CacheConfig, Column, bytes_per_token, read_description
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.activations.format.threads import in_threads
from moray.activations.planning.shards import listed, only_columns
from moray.config import Config, flatten
from moray.data.ultrachat import ChatsConfig
from moray.errors import ConfigError, DataError, UnreachableError
from moray.runs_folder import as_runs
from moray.targets.spec import TargetConfig

ADDING_FILE = "adding.json"
NEXT = ".next"
"""Suffix of a pending marker, which becomes the shard's marker once its new file is in place."""
_COLUMN_KEYS = ("hidden_depths", "kv_layers", "hidden_codec", "kv_codec", "column_codecs")
_MODULE = "pipelines.cache_activations"


class AddingNote(Record):
    """adding.json: the columns being added to a cache."""

    added: list[str]
    """New columns."""
    columns: dict[str, Column]
    """All columns of the extended cache."""
    cache: CacheConfig
    """Settings that select these columns."""


def columns_to_add(store: CacheStore, plan: Mapping[str, object]) -> list[str]:
    """Return the columns that a plan adds to the cache's; none if there is no cache or if anything else differs.

    Args:
        store: the cache, which need not exist.
        plan: the wanted plan, as plain values (`PlanRecord.values`). An empty target fingerprint (weights not read)
            matches the cache's.
    """
    if not store.exists("plan.json"):
        return []
    wanted, present = json.loads(json.dumps(plan)), store.read_plan_values()
    if not wanted["target"]["fingerprint"]:
        wanted["target"]["fingerprint"] = present["target"]["fingerprint"]
    if any(as_runs(present.get(key)) != as_runs(wanted[key]) for key in wanted if key not in ("cache", "columns")):
        return []
    if _but_columns(present["cache"]) != _but_columns(wanted["cache"]):
        return []
    if any(wanted["columns"].get(name) != column for name, column in present["columns"].items()):
        return []
    return [name for name in wanted["columns"] if name not in present["columns"]]


def _but_columns(cache: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in cache.items() if key not in _COLUMN_KEYS}


def stored_columns(store: CacheStore, shard: str) -> dict[str, Column]:
    """Read codec and width of a shard's columns from its own schema.

    Raises:
        DataError: the shard cannot be read.
    """
    with store.open_shard(shard) as file:
        return read_description(file.schema_arrow).columns


@dataclass(frozen=True)
class Addition:
    """Remaining work until every shard has the wanted columns."""

    added: list[str]
    """Columns to add to the cache."""
    shards: dict[str, ShardInfo]
    """Shards to rewrite, by name."""
    num_shards: int
    tokens: int
    """Tokens in all existing shards."""
    bytes: int
    """Bytes by which the cache will still grow."""
    largest: int
    """Bytes of the largest rewritten shard: each shard being rewritten needs up to this much temporary space."""

    @property
    def tokens_left(self) -> int:
        """Tokens that the target has yet to process."""
        return sum(info.tokens for info in self.shards.values())

    @property
    def announcement(self) -> str:
        """One-line summary of the addition."""
        left = len(self.shards)
        shards = f"{self.num_shards:,}" if left == self.num_shards else f"{left:,} of {self.num_shards:,}"
        return f"adding {listed(self.added)} to {shards} shards: {size_text(self.bytes)} more"


def plan_addition(
    store: CacheStore, plan: PlanRecord, added: list[str], shards: dict[str, ShardInfo], missing_tokens: int = 0
) -> Addition:
    """Plan an addition from the schemas of all shards, which are read in parallel.

    Args:
        store: the cache.
        plan: the wanted plan.
        added: columns of the wanted plan that the cache's plan does not name yet.
        shards: the cache's complete shards.
        missing_tokens: tokens of planned shards that do not exist yet and will be written with all columns.

    Raises:
        DataError: a shard cannot be read, or lacks a column of the cache's plan or stores it differently.
    """
    wanted, old = plan.columns, store.read_plan().columns
    stored = dict(zip(shards, in_threads(partial(stored_columns, store), list(shards)), strict=True))
    lacking: dict[str, ShardInfo] = {}
    num_bytes = missing_tokens * bytes_per_token(wanted)
    for name, columns in stored.items():
        if list(columns.items()) == list(wanted.items()):
            continue
        if any(columns.get(column) != old[column] for column in old):
            raise damaged(store, name, "its columns are not the plan's")
        lacking[name] = shards[name]
        new = {column: wanted[column] for column in wanted if columns.get(column) != wanted[column]}
        num_bytes += shards[name].tokens * bytes_per_token(new)
    largest = max((info.tokens for info in lacking.values()), default=0) * bytes_per_token(wanted)
    return Addition(added, lacking, len(shards), sum(i.tokens for i in shards.values()), num_bytes, largest)


def check_addition_fits(addition: Addition, disk: DiskSpace, uri: str) -> None:
    """Refuse an addition that does not fit on the disk, before anything is changed.

    Raises:
        ConfigError: the extended cache exceeds cache.max_bytes or the free space of its file system.
    """
    total = disk.written + addition.bytes
    if disk.fits(total):
        return
    takes = f"adding {listed(addition.added)} to '{uri}' takes about {size_text(addition.bytes)} more"
    if disk.max_bytes is not None and total > disk.max_bytes:
        raise ConfigError(
            f"{takes}, {size_text(disk.written)} are written and cache.max_bytes allows {size_text(disk.max_bytes)}: "
            "raise it, or add fewer columns or in a smaller codec (cache.column_codecs)"
        )
    raise ConfigError(
        f"{takes}, but {size_text(disk.free or 0)} are free, of which {size_text(disk.reserve)} must stay free while "
        "shards are rewritten: make space, or add fewer columns or in a smaller codec (cache.column_codecs)"
    )


def begin_addition(store: CacheStore, plan: PlanRecord, added: list[str]) -> None:
    """Write adding.json, before the first shard is rewritten."""
    store.write_json(ADDING_FILE, _note(plan, added).values)


def is_begun(store: CacheStore, plan: PlanRecord, added: list[str]) -> bool:
    """Return whether the same addition was begun before."""
    return store.exists(ADDING_FILE) and store.read_json(ADDING_FILE) == _note(plan, added).values


def _note(plan: PlanRecord, added: list[str]) -> AddingNote:
    return AddingNote(added=added, columns=plan.columns, cache=plan.cache)


def _read_note(store: CacheStore) -> AddingNote:
    return store.read_record(ADDING_FILE, AddingNote)


def end_addition(store: CacheStore, plan: PlanRecord) -> None:
    """Delete adding.json if the plan has all columns that it names; keep it if another plan was to add them."""
    if store.exists(ADDING_FILE) and _read_note(store).columns.keys() <= plan.columns.keys():
        store.delete(ADDING_FILE)


def extended_plan(store: CacheStore, plan: PlanRecord) -> PlanRecord:
    """Return the plan of the extended cache, with the bytes per token by which its shards were originally cut."""
    return plan.model_copy(update={"shard_token_bytes": shard_token_bytes(store.read_plan())})


def finish_replaced(store: CacheStore, shard: str | None = None) -> None:
    """Commit shards whose new file was written but whose marker was not, because the process was killed in between.

    Then delete the pending markers, whether or not they were used.

    Args:
        store: the cache.
        shard: the shard to check; None for all.
    """
    names = store.names("shards", NEXT) if shard is None else [f"{shard}{NEXT}"]
    for name in names:
        note = f"shards/{name}"
        if not store.exists(note):
            continue
        try:
            info = ShardInfo(**store.read_json(note))
            file = f"shards/{info.name}.parquet"
            if store.size(file) == info.bytes and store.sha256(file) == info.sha256:
                store.commit(info)
        except UnreachableError:
            raise
        except (DataError, TypeError, FileNotFoundError) as error:
            print(f"'{note}' is of no use: {error}")
        store.delete(note)


def refuse_while_adding(store: CacheStore) -> None:
    """Refuse a cache with an unfinished addition.

    Raises:
        DataError: columns are being added; names them and the command that completes the addition.
    """
    if (reason := unfinished_addition(store)) is not None:
        raise DataError(f"'{store.uri}': {reason}")


def unfinished_addition(store: CacheStore) -> str | None:
    """Describe an unfinished addition and the command that completes it; None if there is none."""
    if not store.exists(ADDING_FILE):
        return None
    added = _read_note(store).added
    return f"columns {listed(added)} are being added; complete that with {command_to_add(store, added)}"


def command_to_add(store: CacheStore, missing: Iterable[str]) -> str:
    """Return the command line that adds columns to a cache, quoted for a shell.

    It is the command in the cache's run.yaml with overrides that select the columns. If the cache was made by another
    command (such as the demo), it is built from the settings in run.yaml.
    """
    taps = _taps(store, list(missing))
    try:
        record = yaml.safe_load(store.read_text("run.yaml"))
        argv, settings = [str(word) for word in record["argv"]], record["config"]
        overrides = _overrides(taps, settings["cache"])
        if not argv[0].replace("/", ".").removesuffix(".py").endswith(_MODULE):
            argv = [_MODULE, *_words(settings)]
        if settings["output"] != store.uri:
            overrides = [f"output={store.uri}", *overrides]
    except (DataError, yaml.YAMLError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        overrides = _overrides(taps, store.read_plan().cache.model_dump(mode="json", exclude_unset=True))
        return f"the command that made '{store.uri}', with {shlex.join(overrides)}"
    replaced = tuple(f"{word.partition('=')[0]}=" for word in overrides)
    kept = [word for word in argv[1:] if not word.startswith(replaced)] if replaced else argv[1:]
    return shlex.join(["python", "-m", _MODULE, *kept, *overrides])


def _taps(store: CacheStore, missing: list[str]) -> dict[str, JsonValue]:
    """Return settings that select the cache's columns and the missing ones. If an unfinished addition already covers
    the missing ones, return its settings."""
    if store.exists(ADDING_FILE):
        note = _read_note(store)
        if set(missing) <= set(note.added):
            return note.cache.model_dump(mode="json", exclude_unset=True, include={*_COLUMN_KEYS})
    cache = store.read_plan().cache
    numbers = only_columns(CacheConfig(), missing)
    depths, layers = list(cache.hidden_depths), cache.kv_layers
    depths += sorted({*numbers.hidden_depths} - {*depths}, reverse=True)
    if layers is not None and not {*(numbers.kv_layers or ())} <= {*layers}:
        layers = tuple(sorted({*layers, *(numbers.kv_layers or ())}))
    return {"hidden_depths": [*depths], "kv_layers": None if layers is None else [*layers]}


def _overrides(taps: Mapping[str, JsonValue], cache: Mapping[str, object]) -> list[str]:
    """Return the overrides for the taps that differ from the settings of `cache`."""
    differing = {key: value for key, value in taps.items() if value != cache.get(key)}
    return [f"cache.{key}={_typed(value)}" for key, value in differing.items()]


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _words(settings: dict[str, Any]) -> list[str]:
    """Return the non-default settings of a cache as overrides, with `capture` unchanged."""
    kinds: dict[str, type[Config]] = {"target": TargetConfig, "chats": ChatsConfig, "cache": CacheConfig}
    given: dict[str, Any] = {"output": settings["output"]}
    for key, kind in kinds.items():
        config = kind.model_validate_json(json.dumps(settings[key]))
        given[key] = config.model_dump(mode="json", exclude_defaults=True)
    given["capture"] = settings.get("capture") or {}
    return override_words({key: value for key, value in given.items() if value != {}})


def override_words(settings: Mapping[str, object]) -> list[str]:
    """Return settings as command-line words: key=value."""
    pairs = flatten(settings).items()
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
