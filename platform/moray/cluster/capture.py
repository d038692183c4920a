"""The activation cache on Ray Data: chats -> tokenised parts -> shards of activations.

Two streaming stages with the plan between them. Parts hold tokens only (4 bytes each), so the exact number
of tokens, shards and bytes is known before the target runs: what does not fit is refused, batches can be cut by
length, and a resumed job knows what is missing.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import ray
import ray.data

from moray.activations.channels import CHANNELS_FILE, quantised_columns, read_channels
from moray.activations.extract import ShardWriter
from moray.activations.manifest import LAYOUT_FILE, Manifest, read_manifest, write_layout, write_manifest
from moray.activations.measure import measure_room
from moray.activations.plan import check_fits, count_work, forecast
from moray.activations.sample import project, sample_chats
from moray.activations.schema import FORMAT, CacheConfig, bytes_per_token
from moray.activations.shards import ShardPlan, plan_shards, tap_columns
from moray.activations.store import CacheStore
from moray.activations.survey import find_parts, remove_damaged, survey
from moray.activations.ultrachat import ChatChunk, ChatsConfig, plan_chunks
from moray.cluster.configs import CaptureConfig
from moray.cluster.errors import own_errors
from moray.cluster.full import Goal, told_if_cache_full
from moray.cluster.progress import progress_bar
from moray.cluster.rehearsal import rehearse_on_ray
from moray.cluster.tokenise import tokenise
from moray.errors import ConfigError, DamagedError
from moray.targets.spec import TargetConfig, TargetSpec, read_spec
from moray.text import ChatTokenizer

_FORECAST = "forecast.json"
_REHEARSAL = "rehearsal.json"


def cache_activations(
    output: str, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, capture: CaptureConfig
) -> Manifest:
    """Make or complete the activation cache at `output`. Needs a Ray session.

    Raises:
        ConfigError: there is not enough room for it; nothing has been cached.
        MismatchError: something else is cached at `output`.
        DataError: too many bad rows, or activations that are not finite.
        StorageFullError: there is no room left; the same command goes on once there is.
    """
    store = CacheStore(output)
    wanted = _Wanted.of(target, chats, cache)
    wanted.check_room(store)
    with told_if_cache_full(store) as goal:
        store.claim(wanted.plan())
        found = survey(store)
        remove_damaged(store, found)
        if store.exists("manifest.json") and not found.damaged:
            try:
                manifest = read_manifest(store)
            except DamagedError:
                print(f"'{output}/manifest.json' is damaged: it will be written again")
            else:
                if manifest.shards == found.counting and not find_parts(store, len(wanted.chunks)).damaged:
                    return manifest
        with own_errors():
            counts = tokenise(store, target, wanted.chunks, chats.max_bad_rows, wanted.max_length, capture)
            planned = _plan_shards(store, wanted.columns, cache)
            _prepare(store, wanted, planned, capture, goal)
            _run_target(store, target, cache, capture, planned)
        return write_manifest(store, counts)


def lay_out_cache(
    output: str, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, capture: CaptureConfig, is_kept: bool
) -> None:
    """Tokenise and plan a cache whose shards are made while a drafter trains, if at all. Needs a Ray session.

    Args:
        output: where its plan and tokens lie, and its shards if they are kept.
        target: what will make it.
        chats: what of.
        cache: which taps, and how they are encoded on their way or in the cache.
        capture: how many tokenise.
        is_kept: whether shards will be written: then there must be room for them.

    Raises:
        As `cache_activations`.
    """
    store = CacheStore(output)
    wanted = _Wanted.of(target, chats, cache)
    if is_kept:
        wanted.check_room(store)
    with told_if_cache_full(store) as goal, own_errors():
        store.claim(wanted.plan())
        remove_damaged(store, survey(store))
        if store.exists(LAYOUT_FILE) and not find_parts(store, len(wanted.chunks)).damaged:
            return
        counts = tokenise(store, target, wanted.chunks, chats.max_bad_rows, wanted.max_length, capture)
        planned = _plan_shards(store, wanted.columns, cache)
        if is_kept:
            _prepare(store, wanted, planned, capture, goal)
        row_groups = {
            plan.name: [[planned.lengths[plan.part][row] for row in batch] for batch in plan.batches]
            for plan in planned.shards
        }
        write_layout(store, row_groups, _rehearsal(store, wanted, planned, capture)["hidden_rms"], counts)


@dataclass(frozen=True)
class _Wanted:
    """What a cache is to hold, before anything is read of it."""

    target: TargetConfig
    spec: TargetSpec
    tokenizer: ChatTokenizer
    chats: ChatsConfig
    chunks: list[ChatChunk]
    cache: CacheConfig
    columns: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig) -> "_Wanted":
        spec = read_spec(target.model)
        tokenizer = ChatTokenizer.load(target.model, target.template)
        chunks = plan_chunks(chats, cache.chats_per_part)
        return cls(target, spec, tokenizer, chats, chunks, cache, tap_columns(spec, cache))

    @property
    def rows(self) -> int:
        """Chats, bad ones included."""
        return sum(chunk.num_rows for chunk in self.chunks)

    @property
    def max_length(self) -> int:
        """Beyond its context a target is no longer itself (Mistral's window), or fails."""
        return min(self.cache.max_length, self.spec.max_positions)

    def plan(self) -> dict[str, Any]:
        """What the cache is made of: another plan is another cache."""
        return {
            "format": FORMAT,
            "target": self.spec.model_dump(mode="json"),
            "dtype": self.target.dtype,
            "text_fingerprint": self.tokenizer.fingerprint,
            "chats": self.chats.model_dump(mode="json", exclude={"max_bad_rows"}),
            "files": {chunk.label: chunk.file_bytes for chunk in self.chunks},
            "cache": self.cache.claimed,
            "columns": self.columns,
        }

    def check_room(self, store: CacheStore) -> None:
        """A sample tells in seconds what would otherwise be refused after hours of tokenising."""
        if not store.exists("plan.json"):
            work = project(sample_chats(self.chunks, self.tokenizer, self.max_length), self.rows, self.cache)
            room = measure_room(store, self.cache)
            check_fits(self.spec, self.cache, forecast(self.spec, self.cache, work), room, store.uri)


@dataclass(frozen=True)
class _Planned:
    """All shards of a tokenised cache, and the lengths of the chats of every part."""

    shards: list[ShardPlan]
    lengths: dict[str, list[int]]

    @cached_property
    def tokens_of(self) -> dict[str, int]:
        """Tokens by shard."""
        return {
            plan.name: sum(self.lengths[plan.part][row] for rows in plan.batches for row in rows)
            for plan in self.shards
        }


def _plan_shards(store: CacheStore, columns: dict[str, dict[str, Any]], cache: CacheConfig) -> _Planned:
    lengths = {part: summary["lengths"] for part, summary in find_parts(store).whole.items()}
    shards = [
        plan
        for part, part_lengths in lengths.items()
        for plan in plan_shards(part, part_lengths, cache, bytes_per_token(columns))
    ]
    return _Planned(shards, lengths)


def _prepare(store: CacheStore, wanted: _Wanted, planned: _Planned, capture: CaptureConfig, goal: Goal) -> None:
    """Between the stages: refuse what does not fit, rehearse, and tell."""
    cache = wanted.cache
    plan = forecast(wanted.spec, cache, count_work(planned.shards, planned.lengths, wanted.rows), len(planned.shards))
    committed = survey(store).planned
    room = measure_room(store, cache)
    if not committed:  # the text alone can be made again
        room = replace(room, written=0)
    try:
        check_fits(wanted.spec, cache, plan, room, store.uri)
    except ConfigError:
        if not committed:  # so that what is advised can be typed for the same output
            store.filesystem.delete_dir(store.path("tokens"))
            for name in (_FORECAST, _REHEARSAL, CHANNELS_FILE, "plan.json"):
                store.delete(name)
        raise
    goal.total = plan.total
    if planned.tokens_of.keys() <= set(committed):
        return
    if committed:
        read_channels(store, wanted.columns)  # raises: new ones would not be those of the shards that are there
    is_new = not store.exists(_FORECAST)
    plan = replace(plan, tokens_per_second=_rehearsal(store, wanted, planned, capture)["tokens_per_second"])
    if is_new:
        store.write_json(_FORECAST, plan.record(room, capture.num_targets))
    print("\n".join(plan.lines(room, capture.num_targets)))


def _rehearsal(store: CacheStore, wanted: _Wanted, planned: _Planned, capture: CaptureConfig) -> dict[str, Any]:
    """What the target told on a few batches, once per cache."""
    if store.exists(_REHEARSAL) and (not quantised_columns(wanted.columns) or store.exists(CHANNELS_FILE)):
        return store.read_json(_REHEARSAL)
    told = rehearse_on_ray(store, wanted.target, wanted.cache, capture, planned.shards)
    store.write_json(_REHEARSAL, told)
    return told


class _ShardActor:
    """Holds one target replica and writes shards with it."""

    def __init__(self, uri: str, target: dict[str, Any], cache: dict[str, Any], threads: int) -> None:
        import torch

        from moray.targets.model import Target

        torch.set_num_threads(threads)
        config = CacheConfig.model_validate(cache)
        self._writer = ShardWriter(Target.load(TargetConfig.model_validate(target)), CacheStore(uri), config)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        infos = [self._writer.write(ShardPlan(**json.loads(plan))) for plan in batch["plan"]]
        return {"tokens": [info.tokens for info in infos]}


def _run_target(
    store: CacheStore,
    target: TargetConfig,
    cache: CacheConfig,
    capture: CaptureConfig,
    planned: _Planned,
) -> None:
    """Stage 2: write the shards that are missing."""
    done = survey(store).planned
    missing = [plan for plan in planned.shards if plan.name not in done]
    if not missing:
        return
    items = [{"plan": json.dumps(asdict(plan))} for plan in missing]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _ShardActor,
        fn_constructor_args=(store.uri, target.model_dump(), cache.model_dump(), capture.threads_per_target),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(capture.num_targets, len(items))),
        num_cpus=capture.cpus_per_target,
        num_gpus=capture.gpus_per_target,
    )
    tokens_of = planned.tokens_of
    with progress_bar() as bar:
        finished = sum(tokens_of[name] for name in done if name in tokens_of)
        task = bar.add_task("cache", total=sum(tokens_of.values()), completed=finished, note="")
        for row in dataset.iter_rows():
            bar.update(task, advance=int(row["tokens"]))
            made = bar.tasks[0].completed - finished
            bar.update(task, note=f"{made / (bar.tasks[0].elapsed or 1.0):,.0f} tokens/s")
