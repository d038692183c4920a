"""Windows of activations that target replicas make while a drafter trains, in place of reading them.

    stream   nothing is written: every epoch runs the target again, over just the taps that the drafter reads
    hybrid   a window's missing shards are written whole, then read: later epochs and runs find them

Both keep the order, the batches and the format of a cache that is read, so that whoever takes the windows cannot
tell the difference.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from moray.activations.capture.attempts import ATTEMPTS_FOLDER, MAX_ATTEMPTS, Attempts
from moray.activations.capture.extract import ShardWriter
from moray.activations.format.manifest import Manifest, read_layout, read_manifest
from moray.activations.format.schema import CacheConfig, hidden_column, kv_column, shard_token_bytes
from moray.activations.format.store import CacheStore
from moray.activations.planning.shards import ShardPlan, only_columns, plan_shards
from moray.batch import TapNeeds
from moray.cluster.training.configs import DistillConfig, LiveSource
from moray.cluster.training.windows import read_window
from moray.errors import DataError
from moray.targets.spec import TargetConfig


def open_source(config: DistillConfig) -> Manifest:
    """The cache of a run, or the layout of one that is made on the way.

    A hybrid run's cache that is complete may have been compacted since, so its shards are those of its manifest.

    Raises:
        DataError: there is none.
    """
    store, kind = CacheStore(config.activations), config.source.type
    is_complete = kind == "disk" or (kind == "hybrid" and store.exists("manifest.json"))
    return read_manifest(store) if is_complete else read_layout(store)


@dataclass(frozen=True)
class LiveTargets:
    """The target replicas of one training worker: what they run, and on what."""

    target: TargetConfig
    source: LiveSource
    num_targets: int

    def arguments(self, uri: str, needs: TapNeeds, columns: list[str]) -> tuple[Any, ...]:
        """What `LiveWindows` is made with."""
        cache = self.source.cache
        stored = cache if self.source.type == "hybrid" else only_needed(cache, needs)
        settings = {"planned": cache.model_dump(), "stored": stored.model_dump()}
        capture = self.source.capture
        return (
            uri,
            self.target.model_dump(),
            settings,
            columns,
            self.source.type == "hybrid",
            capture.threads_per_target,
            uuid.uuid4().hex[:8],
        )


def only_needed(cache: CacheConfig, needs: TapNeeds) -> CacheConfig:
    """The same cache with no tap but those that a drafter reads: the others need not be encoded."""
    return only_columns(cache, [*map(kv_column, needs.kv_layers), *map(hidden_column, needs.hidden_depths)])


class LiveWindows:
    """Holds one target replica and makes windows with it; a Ray actor."""

    def __init__(
        self,
        uri: str,
        target: dict[str, Any],
        settings: dict[str, Any],
        columns: list[str],
        keeps: bool,
        threads: int,
        stage: str,
    ) -> None:
        self._store = CacheStore(uri)
        self._columns = columns
        self._keeps = keeps
        self._target = target
        self._threads = threads
        self._planned = CacheConfig.model_validate(settings["planned"])
        self._stored = CacheConfig.model_validate(settings["stored"])
        self._stage = stage  # other runs may make the same windows now
        self._attempts = Attempts(self._store, ATTEMPTS_FOLDER)
        self._part = ""
        self._plans: dict[str, ShardPlan] = {}

    def window(self, row_groups: Sequence[tuple[str, int]]) -> pa.Table:
        """A window's chats, as `windows.read_window` gives them.

        Raises:
            DataError: replicas die over these row groups.
        """
        if not self._keeps:
            return self._make(row_groups)
        for shard in dict.fromkeys(shard for shard, _ in row_groups):
            if not self._store.exists(f"shards/{shard}.json"):
                self._writer.write(self._plan(shard))
        return read_window(row_groups, self._store.uri, self._columns)

    def _make(self, row_groups: Sequence[tuple[str, int]]) -> pa.Table:
        """
        Raises:
            DataError: replicas die over these row groups.
        """
        shard, group = row_groups[0]
        name = f"{self._stage}-{shard}-{group}"
        if not self._attempts.begin(name):
            raise DataError(
                f"{MAX_ATTEMPTS} target replicas died over row group {group} of shard '{shard}' of '{self._store.uri}' "
                f"or the {len(row_groups) - 1} after it, out of memory perhaps: give a smaller "
                "source.capture.num_targets, or a smaller source.cache.batch_tokens and another activations folder"
            )
        try:
            tables = [self._writer.compute(self._plan(shard), group) for shard, group in row_groups]
        finally:
            self._attempts.end(name)
        return pa.concat_tables([table.select(self._columns) for table in tables])

    @cached_property
    def _writer(self) -> ShardWriter:
        """Loaded at the first window and not with the actor, so that what is wrong comes back as that window's error:
        Ray would start an actor again and again whose constructor fails."""
        import torch

        from moray.targets.model import Target

        torch.set_num_threads(self._threads)
        loaded = Target.load(TargetConfig.model_validate(self._target))
        return ShardWriter(loaded, self._store, self._stored)

    @cached_property
    def _token_bytes(self) -> int:
        return shard_token_bytes(self._store.read_json("plan.json"))

    def _plan(self, shard: str) -> ShardPlan:
        """The plan of one shard; those of one part are made together and kept until another part is asked for."""
        part = f"part-{shard.rpartition('-')[0]}"
        if part != self._part:
            lengths = self._store.read_json(f"tokens/{part}.json")["lengths"]
            self._plans = {plan.name: plan for plan in plan_shards(part, lengths, self._planned, self._token_bytes)}
            self._part = part
        return self._plans[shard]
