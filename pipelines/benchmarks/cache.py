"""The cost of caching by stage: tokenise, capture with each codec, read back.

Each stage runs in its own process, on one replica and without Ray, so that its peak memory and speed can be told
apart; it calls the same functions as Ray's actors. Capture is timed after a warm-up, without loading. The data read
back was just written and comes from the page cache, so the read speed is that of decoding the codec.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moray.activations.capture.calibration import calibrate, calibration_batches
from moray.activations.capture.extract import ShardWriter, token_arrays
from moray.activations.format.channels import quantised_columns, write_channels
from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import read_manifest, write_manifest
from moray.activations.format.records import PartSummary
from moray.activations.format.schema import CacheConfig, bytes_per_token
from moray.activations.format.store import CacheStore
from moray.activations.planning.cache_spec import CacheSpec
from moray.activations.planning.shards import ShardPlan, plan_shards, tap_columns
from moray.activations.reading.collate import collate, needed_columns
from moray.activations.reading.epochs import plan_epoch
from moray.batch import TapNeeds
from moray.bench.recording import record
from moray.cluster.caching.tokenise import PartWriter
from moray.data.ultrachat import plan_chunks
from moray.errors import DataError
from moray.progress import Progress
from moray.targets.model import Target
from moray.targets.spec import read_spec
from pipelines.benchmarks.cluster_configs import CacheBenchmarkConfig
from pipelines.benchmarks.isolated import measure_alone


def benchmark_cache(config: CacheBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure all stages with each pair of codecs; the figures of the first pair are repeated at the top level.

    Raises:
        DataError: no chat is usable.
    """
    stages: list[dict[str, Any]] = []
    progress = Progress("benchmark cache", 1 + 2 * len(config.codecs), unit="stages", console=console)
    with tempfile.TemporaryDirectory(dir=config.folder) as folder, progress:
        settings = config.model_dump_json()
        stages.append(measure_alone(_tokenise, settings, folder))
        progress.advance()
        for kv, hidden in config.codecs:
            names = {"kv_codec": kv, "hidden_codec": hidden}
            for stage in (_capture, _read):
                stages.append(measure_alone(stage, settings, folder, kv, hidden) | names)
                progress.advance()
    captured = next(stage for stage in stages if stage["stage"] == "capture")
    return {
        "bytes_per_token": captured["bytes_per_token"],
        "tokens_per_second": captured["tokens_per_second"],
        "padding_waste": captured["padding_waste"],
        "peak_memory_bytes": max(stage["peak_memory_bytes"] for stage in stages),
        "stages": stages,
    } | record(config)


def print_cache_benchmark(result: dict[str, Any], console: Console) -> None:
    """Print one line per stage and codec."""
    table = Table(title="Caching, one replica", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("stage", "K/V", "hidden"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "bytes/token", "GB/s", "padding", "peak GiB"):
        table.add_column(name, justify="right")
    for stage in result["stages"]:
        table.add_row(
            stage["stage"],
            stage.get("kv_codec", ""),
            stage.get("hidden_codec", ""),
            f"{stage['tokens_per_second']:,.0f}",
            f"{stage['bytes_per_token']:,.0f}",
            f"{stage['gigabytes_per_second']:.3f}",
            f"{stage['padding_waste']:.1%}" if "padding_waste" in stage else "",
            f"{stage['peak_memory_bytes'] / 2**30:.2f}",
        )
    console.print(table)


def _tokenise(settings: str, folder: str) -> dict[str, Any]:
    """Tokenise chats into parts."""
    config = CacheBenchmarkConfig.model_validate_json(settings)
    chunks = plan_chunks(config.chats, config.cache.chats_per_part)
    spec = read_spec(config.target.model)
    length = min(config.cache.max_length, spec.max_positions)
    writer = PartWriter(folder, config.target, length)
    begin = time.perf_counter()
    summaries = [writer.write(f"part-{number:05d}", chunk) for number, chunk in enumerate(chunks)]
    seconds = time.perf_counter() - begin
    tokens = sum(sum(summary.lengths) for summary in summaries)
    if not tokens:
        raise DataError(f"chats.path '{config.chats.path}' holds no chat with an assistant turn: name another")
    store = CacheStore(folder)
    size = sum(store.size(f"tokens/{name}") for name in store.names("tokens", ".parquet"))
    return _figures("tokenise", tokens, size, seconds) | {"chats": sum(summary.chats for summary in summaries)}


def _cache_config(config: CacheBenchmarkConfig, kv: Any, hidden: Any) -> CacheConfig:
    return config.cache.model_copy(update={"kv_codec": kv, "hidden_codec": hidden})


def _open(folder: str, kv: str, hidden: str) -> CacheStore:
    """Open the store of one pair of codecs; all pairs share the tokenised parts."""
    path = Path(folder) / f"{kv}-{hidden}"
    path.mkdir(exist_ok=True)
    if not (path / "tokens").exists():
        (path / "tokens").symlink_to(Path(folder) / "tokens")
    return CacheStore(str(path))


def _capture(settings: str, folder: str, kv: str, hidden: str) -> dict[str, Any]:
    """Capture activations: parts to shards."""
    import torch

    config = CacheBenchmarkConfig.model_validate_json(settings)
    torch.set_num_threads(config.threads)
    cache = _cache_config(config, kv, hidden)
    target = Target.load(config.target, packs=False)
    columns = tap_columns(target.spec, cache)
    store = _open(folder, kv, hidden)
    store.write_json("plan.json", CacheSpec.of(config.target, config.chats, cache).plan().values)
    plans: list[ShardPlan] = []
    lengths_of: dict[str, list[int]] = {}
    for marker in store.names("tokens", ".json"):
        part = marker[:-5]
        lengths_of[part] = store.read_record(f"tokens/{marker}", PartSummary).lengths
        plans += plan_shards(part, lengths_of[part], cache, bytes_per_token(columns))
    batches = [
        token_arrays(store.read_table(f"tokens/{plan.part}.parquet").take(plan.batches[0]))
        for plan in calibration_batches(plans)
    ]
    calibration = calibrate(target, cache, batches)  # also serves as the warm-up
    if quantised_columns(columns):
        write_channels(store, calibration.channels)
    writer = ShardWriter(target, store, cache)
    begin = time.perf_counter()
    infos = [writer.write(plan) for plan in plans]
    seconds = time.perf_counter() - begin
    write_manifest(store, {})
    widths = [[lengths_of[plan.part][row] for row in batch] for plan in plans for batch in plan.batches]
    tokens, size = sum(info.tokens for info in infos), sum(info.bytes for info in infos)
    figures = _figures("capture", tokens, size, seconds) | {"padding_waste": padding_waste(widths)}
    return figures | {"peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None}


def _read(settings: str, folder: str, kv: str, hidden: str) -> dict[str, Any]:
    """Read shards into training batches, shuffled as in an epoch, without training on them."""
    import pyarrow as pa
    import torch

    from moray.cluster.training.windows import read_window

    config = CacheBenchmarkConfig.model_validate_json(settings)
    torch.set_num_threads(config.threads)
    store = _open(folder, kv, hidden)
    manifest = read_manifest(store)
    cache = _cache_config(config, kv, hidden)
    layers = cache.kv_layers if cache.kv_layers is not None else range(manifest.plan.target.num_layers)
    needs = TapNeeds(tuple(layers), (-1,))
    columns = needed_columns(needs, manifest.columns)
    plan = plan_epoch(manifest.lengths, config.train_batch_tokens, 0, 0, 1)[0]
    decoder = TapDecoder.open(store, manifest)
    size = sum(bytes_per_token({name: manifest.columns[name]}) for name in columns if name in manifest.columns)
    tokens, places = 0, 0
    begin = time.perf_counter()
    for window in plan.windows:
        table = read_window(window.row_groups, store.uri, columns)
        for rows in window.batches:
            batch = collate(pa.concat_tables([table.slice(row, 1) for row in rows]), needs, decoder)
            tokens += batch.num_tokens
            places += batch.tokens.numel()
    seconds = time.perf_counter() - begin
    return _figures("read", tokens, tokens * size, seconds) | {"padding_waste": 1.0 - tokens / max(1, places)}


def padding_waste(batches: Sequence[Sequence[int]]) -> float:
    """Share of padding positions over all padded batches, each given by the lengths of its chats."""
    tokens = sum(map(sum, batches))
    places = sum(len(lengths) * max(lengths) for lengths in batches)
    return 1.0 - tokens / max(1, places)


def _figures(stage: str, tokens: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "stage": stage,
        "tokens": tokens,
        "bytes": size,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "bytes_per_token": size / tokens,
        "gigabytes_per_second": size / seconds / 1e9,
    }
