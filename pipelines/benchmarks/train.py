"""The cost of training: from a cache, online with the target running alongside, and by the published recipe.

    cached   reads and decodes windows of the cache and updates the drafter, as pipelines.distill does
    online   the same batches, but reads only tokens and runs the target over them to get the taps
    recipe   the published loop (`pipelines.benchmarks.recipe`): chat by chat, target again, dense masks, all logits

All three take turns on the same chats in one process that is set up like a training worker; peak memory is measured in
a separate process for each. A cached epoch can be at most 1 + target / training times as fast as an online one; that
limit is reported too.

Two ratios compare with the recipe: worker against worker and, on CPUs, machine against machine. The latter compares
`workers` data-parallel workers with the recipe's single process using as many threads. On GPUs only the first ratio is
measured, because the published code trains on several GPUs as well.
"""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed
from rich import box
from rich.console import Console
from rich.table import Table

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.bench.recording import record
from moray.cluster.training.configs import DistillConfig
from moray.config import merge, read_yaml, validate
from moray.progress import Progress
from pipelines.benchmarks.cluster_configs import TrainBenchmarkConfig
from pipelines.benchmarks.isolated import forget_peak, measure_alone, resident_memory
from pipelines.benchmarks.ways_to_train import WAYS, WaysToTrain, median_ratio

_MACHINE_TURNS = 5


def benchmark_training(config: TrainBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every drafter; the figures of the first one are repeated at the top level.

    Raises:
        ConfigError: a YAML file is not a valid training configuration.
        DataError: the cache of a run is incomplete.
    """
    runs = {path: _run_config(config, path) for path in config.runs}
    for run in runs.values():
        read_manifest(CacheStore(run.activations))  # reports a missing cache before anything is measured
    settings = config.model_dump_json()
    rows = []
    with Progress("benchmark train", len(runs) * (1 + len(WAYS)), unit="measurements", console=console) as progress:
        for path in runs:
            progress.update(note=f"{path}: speeds")
            row = measure_alone(_row_of, settings, path)
            progress.advance()
            ways = list(row["tokens_per_second_by_way"])
            memory = {}
            for way in ways:
                progress.update(note=f"{path}: memory, {way}")
                memory[way] = measure_alone(_memory_of, settings, path, way)
                progress.advance()
            peaks = {
                "peak_memory_bytes": {way: figures["peak_memory_bytes"] for way, figures in memory.items()},
                "memory_before_bytes": {way: figures["before_bytes"] for way, figures in memory.items()},
            }
            has_machine = "recipe" in ways and not torch.cuda.is_available()
            if has_machine:
                progress.update(note=f"{path}: the whole machine")
            machine = _whole_machine(config, path) if has_machine else None
            rows.append(row | peaks | {"run": path, "whole_machine": machine})
    first = rows[0]
    top = ("tokens_per_second", "cached_vs_online", "padding_waste", "bytes_per_token")
    return {
        **{name: first[name] for name in top},
        "speedup_vs_recipe": (first["whole_machine"] or {}).get("speedup", first["speedup_vs_recipe_per_worker"]),
        "speedup_vs_recipe_per_worker": first["speedup_vs_recipe_per_worker"],
        "peak_memory_bytes": first["peak_memory_bytes"]["cached"],
        "rows": rows,
    } | record(config)


def print_train_benchmark(result: dict[str, Any], console: Console) -> None:
    """Print one row per drafter with its speeds and peak memory."""
    table = _table("Training, one worker: tokens/s")
    for name in (*WAYS, "cached /\nonline", "at most", "cached /\nrecipe", "padding", "MFU"):
        table.add_column(name, justify="right")
    memory = _table("Peak memory, MiB")
    for name in WAYS:
        memory.add_column(name, justify="right")
    for row in result["rows"]:
        speeds = [row["tokens_per_second_by_way"].get(way) for way in WAYS]
        ratios = (row["cached_vs_online"], row["cached_vs_online_limit"], row["speedup_vs_recipe_per_worker"])
        table.add_row(
            row["drafter"],
            *("" if speed is None else f"{speed:,.0f}" for speed in speeds),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{row['padding_waste']:.1%}",
            "" if row["mfu"] is None else f"{row['mfu']:.0%}",
        )
        peaks = row["peak_memory_bytes"]
        memory.add_row(row["drafter"], *(f"{peaks[way] / 2**20:,.0f}" if way in peaks else "" for way in WAYS))
    console.print(table)
    for row in result["rows"]:
        if machine := row["whole_machine"]:
            console.print(
                f"{row['drafter']}, whole machine: {machine['workers']} workers {machine['cached']:,.0f} tokens/s, the "
                f"recipe with as many threads {machine['recipe']:,.0f}: {machine['speedup']:.2f} times",
                highlight=False,
            )
    console.print(memory)


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("drafter", no_wrap=True)
    return table


def _run_config(config: TrainBenchmarkConfig, path: str) -> DistillConfig:
    values = merge(read_yaml(Path(path)), {"target": config.target.model_dump(mode="json")})
    return validate(DistillConfig, merge(values, {"train": {"precision": config.precision}}))


def _whole_machine(config: TrainBenchmarkConfig, path: str) -> dict[str, Any]:
    """Alternately measure all workers together and the recipe with as many threads, in tokens per second."""
    workers = config.workers
    cached, recipe = [], []
    settings = config.model_dump_json()
    for _ in range(_MACHINE_TURNS):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
            meeting = f"file://{folder}/meeting"
            share = [(rank, workers, meeting) for rank in range(workers)]
            figures = list(pool.map(lambda place: measure_alone(_speed_of, settings, path, "cached", *place), share))
        cached.append(sum(one["tokens"] for one in figures) / figures[0]["seconds"])
        alone = measure_alone(_speed_of, settings, path, "recipe", 0, 1, None)
        recipe.append(alone["tokens"] / alone["seconds"])
    speeds = {"cached": median(cached), "recipe": median(recipe)}
    return {"workers": workers, **speeds, "speedup": median_ratio(cached, recipe)}


def _speed_of(settings: str, path: str, way: str, rank: int, workers: int, meeting: str | None) -> dict[str, Any]:
    """Measure one of several workers that train together or, without `meeting`, one worker with all their threads."""
    config = TrainBenchmarkConfig.model_validate_json(settings)
    torch.set_num_threads(config.threads if meeting else config.threads * config.workers)
    if meeting is not None:
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
    bench = WaysToTrain(_run_config(config, path), config, rank, workers)
    step = bench.step_of(way)
    step()
    rounds = []
    for _ in range(config.rounds):
        if meeting is not None:
            torch.distributed.barrier()
        begin = time.perf_counter()
        step()
        bench.wait()
        if meeting is not None:
            torch.distributed.barrier()
        rounds.append(time.perf_counter() - begin)
    return {"tokens": bench.num_tokens, "seconds": median(rounds)}


def _row_of(settings: str, path: str) -> dict[str, Any]:
    """Measure all ways to train in turn."""
    config = TrainBenchmarkConfig.model_validate_json(settings)
    torch.set_num_threads(config.threads)
    return WaysToTrain(_run_config(config, path), config).measure()


def _memory_of(settings: str, path: str, way: str) -> dict[str, Any]:
    """Measure the memory of one round of one way to train; runs in its own process."""
    config = TrainBenchmarkConfig.model_validate_json(settings)
    torch.set_num_threads(config.threads)
    bench = WaysToTrain(_run_config(config, path), config)
    before = resident_memory()
    forget_peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        bench.step_of(way)()
        return {"before_bytes": before, "peak_memory_bytes": torch.cuda.max_memory_allocated()}
    bench.step_of(way)()
    return {"before_bytes": before}
