"""Computes windows of activations with target replicas during training, instead of reading them from a cache.

    stream   writes nothing: every epoch runs the target again, for just the taps that the drafter reads
    hybrid   writes a window's missing shards whole, then reads them: later epochs and runs find them

Both keep the order, the batches and the format of a stored cache, so that a consumer of the windows cannot tell the
difference.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from moray.activations.capture.attempts import ATTEMPTS_FOLDER, MAX_ATTEMPTS, Attempts
from moray.activations.capture.extract import ShardWriter
from moray.activations.format.manifest import Manifest, read_layout, read_manifest
from moray.activations.format.records import PartSummary, PlanRecord, shard_token_bytes
from moray.activations.format.schema import CacheConfig, hidden_column, kv_column
from moray.activations.format.store import CacheStore
from moray.activations.planning.shards import ShardPlan, only_columns, plan_shards
from moray.batch import TapNeeds
from moray.cluster.lost_ranks import exit_on_lost_rank
from moray.cluster.training.configs import LiveSource, TrainingConfig
from moray.cluster.training.windows import read_window
from moray.errors import DataError
from moray.targets.spec import TargetConfig


def open_source(config: TrainingConfig) -> Manifest:
    """Read the manifest of a run's cache, or the layout of a cache that is computed during training.

    For a complete cache of a hybrid run, read the manifest, because the cache may have been compacted since.

    Raises:
        DataError: there is no manifest or layout.
    """
    store, kind = CacheStore(config.activations), config.source.type
    is_complete = kind == "disk" or (kind == "hybrid" and store.exists("manifest.json"))
    return read_manifest(store) if is_complete else read_layout(store)


@dataclass(frozen=True)
class WindowSettings:
    """Settings of a replica that computes windows; picklable."""

    store: CacheStore
    target: TargetConfig
    planned: CacheConfig
    """Settings by which chats were cut into shards."""
    stored: CacheConfig
    """Settings that select the taps to encode."""
    columns: list[str]
    """Columns of a window's table."""
    is_kept: bool
    """Whether shards are written."""
    threads: int
    """Number of torch threads."""
    stage: str
    """Unique prefix for attempt counts: other runs may compute the same windows at the same time."""


@dataclass(frozen=True)
class LiveTargets:
    """Target replicas of one training worker, and what they run."""

    target: TargetConfig
    source: LiveSource
    num_targets: int

    def settings(self, uri: str, needs: TapNeeds, columns: list[str]) -> WindowSettings:
        """Return the settings of the replicas."""
        cache, is_kept = self.source.cache, self.source.type == "hybrid"
        return WindowSettings(
            CacheStore(uri),
            self.target,
            planned=cache,
            stored=cache if is_kept else only_needed(cache, needs),
            columns=columns,
            is_kept=is_kept,
            threads=self.source.capture.threads_per_target,
            stage=uuid.uuid4().hex[:8],
        )


def only_needed(cache: CacheConfig, needs: TapNeeds) -> CacheConfig:
    """Return the cache settings with only the taps that a drafter reads: the others need not be encoded."""
    return only_columns(cache, [*map(kv_column, needs.kv_layers), *map(hidden_column, needs.hidden_depths)])


class LiveWindows:
    """Ray actor that holds one target replica and computes windows with it."""

    def __init__(self, settings: WindowSettings) -> None:
        self._settings = settings
        self._store = settings.store
        self._attempts = Attempts(self._store, ATTEMPTS_FOLDER)
        self._part = ""
        self._plans: dict[str, ShardPlan] = {}

    def window(self, row_groups: Sequence[tuple[str, int]]) -> pa.Table:
        """Return a window's chats in the format of `windows.read_window`.

        Raises:
            DataError: replicas die over these row groups.
        """
        with exit_on_lost_rank():
            if not self._settings.is_kept:
                return self._make(row_groups)
            for shard in dict.fromkeys(shard for shard, _ in row_groups):
                if not self._store.exists(f"shards/{shard}.json"):
                    self._writer.write(self._plan(shard))
        return read_window(row_groups, self._store.uri, self._settings.columns)

    def _make(self, row_groups: Sequence[tuple[str, int]]) -> pa.Table:
        """Compute a window without storing it.

        Raises:
            DataError: replicas die over these row groups.
        """
        shard, group = row_groups[0]
        name = f"{self._settings.stage}-{shard}-{group}"
        if not self._attempts.begin(name):
            raise DataError(
                f"{MAX_ATTEMPTS} target replicas died over row group {group} of shard '{shard}' of '{self._store.uri}' "
                f"or the {len(row_groups) - 1} after it, out of memory perhaps: give a smaller "
                "source.capture.num_targets, or a smaller source.cache.batch_tokens and another activations folder"
            )
        with self._attempts.clearing(name):
            tables = [self._writer.compute(self._plan(shard), group) for shard, group in row_groups]
        return pa.concat_tables([table.select(self._settings.columns) for table in tables])

    @cached_property
    def _writer(self) -> ShardWriter:
        """Shard writer, loaded at the first window rather than in the constructor, so that a failure is that window's
        error: Ray would restart an actor whose constructor fails again and again."""
        import torch

        from moray.targets.model import Target

        torch.set_num_threads(self._settings.threads)
        return ShardWriter(Target.load(self._settings.target, packs=False), self._store, self._settings.stored)

    @cached_property
    def _token_bytes(self) -> int:
        return shard_token_bytes(self._store.read_record("plan.json", PlanRecord))

    def _plan(self, shard: str) -> ShardPlan:
        """Return the plan of one shard; those of one part are made together and kept until another part is needed."""
        part = f"part-{shard.rpartition('-')[0]}"
        if part != self._part:
            lengths = self._store.read_record(f"tokens/{part}.json", PartSummary).lengths
            plans = plan_shards(part, lengths, self._settings.planned, self._token_bytes)
            self._plans = {plan.name: plan for plan in plans}
            self._part = part
        return self._plans[shard]
