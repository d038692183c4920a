"""Implements `pipelines.cache_activations plan`: forecasts a cache from a sample, without writing anything."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from moray.activations.format.disk_space import DiskSpace, size_text
from moray.activations.format.scan import scan
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import columns_to_add, plan_addition
from moray.activations.planning.cache_spec import CacheSpec
from moray.activations.planning.measure import measure_disk_space
from moray.activations.planning.plan import (
    Choice,
    Forecast,
    codec_choices,
    fewer_chats,
    forecast,
    subset_choices,
)
from moray.activations.planning.sample import Sample, project, sample_chats
from moray.activations.planning.shards import plan_shards
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig, TargetSpec, resolve_folder


@dataclass(frozen=True)
class Workers:
    """Target replicas that share the work."""

    num_targets: int
    threads: int
    """Torch threads per replica."""
    need_gpu: bool
    """Whether replicas run on GPUs; if this machine has none, the duration is left out."""


def print_plan(
    output: str, target: TargetConfig, chats: ChatsConfig, cache: CacheConfig, workers: Workers, console: Console
) -> None:
    """Forecast a cache from a few hundred chats, and print it beside all alternatives.

    The target's configuration and tokenizer are enough; without its weights, the duration is left out.

    Args:
        output: location of the cache, whose free space is measured.
        target: target whose activations are cached.
        chats: chats to cache.
        cache: what to store.
        workers: replicas of the target.
        console: where to print.
    """
    store = CacheStore(output)
    wanted = CacheSpec.of(target, chats, cache, needs_weights=False)
    spec = wanted.spec
    sample = sample_chats(wanted.chunks, wanted.tokenizer, wanted.max_length)
    work = project(sample, wanted.rows, cache)
    plan = replace(forecast(spec, cache, work), tokens_per_second=_speed(target, cache, sample, workers))
    disk = measure_disk_space(store, cache)
    added = columns_to_add(store, wanted.plan().values)
    shown = replace(plan, tokens_per_second=None) if added else plan  # the target also runs over written shards
    lines = [f"from {sample.rows:,} of {work.rows:,} rows:", *shown.lines(disk, workers.num_targets)]
    if added:
        lines += _addition_lines(store, wanted, added, plan, workers)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print(_table(spec, cache, plan, disk))
    if not disk.fits(plan.total):
        fewer = fewer_chats(plan, disk)
        advice = f"; as it is, {fewer.overrides} fits" if fewer else ""
        console.print(f"it does not fit{advice}", markup=False, highlight=False)


def _addition_lines(
    store: CacheStore, wanted: CacheSpec, added: list[str], plan: Forecast, workers: Workers
) -> list[str]:
    """Describe the cost of adding columns to the existing cache, from the exact token counts of its shards."""
    found = scan(store).counting
    addition = plan_addition(store, wanted.plan(), added, found)
    hours = replace(plan, workload=replace(plan.workload, tokens=addition.tokens_left)).hours(workers.num_targets)
    takes = "" if hours is None else f", {hours:.1f} hours" if hours >= 1 else f", {hours * 60:.0f} minutes"
    return [f"the cache that is there is kept and grows: {addition.announcement}{takes}"]


def _table(spec: TargetSpec, cache: CacheConfig, plan: Forecast, disk: DiskSpace) -> Table:
    table = Table(show_edge=False)
    for name, justify in (("overrides", "left"), ("bytes/token", "right"), ("total", "right"), ("fits", "left")):
        table.add_column(name, justify=justify, no_wrap=name != "overrides")  # pyright: ignore[reportArgumentType]
    as_it_is = Choice("as configured", "", plan.total)
    codecs = codec_choices(spec, cache, plan.workload)
    subsets = subset_choices(spec, cache, plan.workload)
    for group in ([as_it_is], codecs, subsets):
        for choice in group:
            _add(table, choice, plan, disk)
        table.add_section()
    return table


def _add(table: Table, choice: Choice, plan: Forecast, disk: DiskSpace) -> None:
    per_token = (choice.bytes - plan.bytes["text"]) / max(1, plan.workload.tokens)
    what = f"{choice.overrides} ({choice.what_for})" if choice.what_for else choice.overrides
    fits = "unknown" if disk.left is None else "yes" if disk.fits(choice.bytes) else "no"
    table.add_row(what.replace("[", r"\["), f"{per_token:,.0f}", size_text(choice.bytes), fits)


def _speed(target: TargetConfig, cache: CacheConfig, sample: Sample, workers: Workers) -> float | None:
    """Measure the tokens per second of one target here; None if its weights or the required GPU are missing."""
    folder = resolve_folder(target.model, needs_weights=False)
    if not any(folder.glob("*.safetensors")):
        return None
    import torch

    if workers.need_gpu and not torch.cuda.is_available():
        return None
    torch.set_num_threads(workers.threads)
    from moray.activations.capture.calibration import calibrate, calibration_batches
    from moray.targets.model import Target

    lengths = [len(tokens) for tokens in sample.tokens]
    shards = plan_shards("part-00000", lengths, cache, token_bytes=1)
    batches = [_batch(sample.tokens, plan.batches[0]) for plan in calibration_batches(shards)]
    return calibrate(Target.load(target, packs=False), cache, batches).tokens_per_second


def _batch(tokens: Sequence[np.ndarray], rows: Sequence[int]) -> list[np.ndarray]:
    return [tokens[row].astype(np.int64) for row in rows]
