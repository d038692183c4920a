"""Computes statistics of a cache from its manifest and, for prompt and response tokens, from its parts."""

from typing import TypedDict

import numpy as np

from moray.activations.format.manifest import Manifest
from moray.activations.format.store import CacheStore
from moray.activations.format.threads import in_threads
from moray.activations.reading.epochs import plan_epoch
from moray.errors import DataError

_NUM_BINS = 12
_BAR = 40
_TOKEN_BYTES = 4 + 1 / 8  # id and mask, as Arrow stores them


class TokenBytes(TypedDict):
    """Bytes per token."""

    columns: dict[str, int]
    """Bytes of each tap column."""
    nominal: float
    """Bytes of all columns, with the token's id and mask."""
    stored: float
    """Bytes on disk."""


class LengthFigures(TypedDict):
    """Distribution of the tokens per chat."""

    mean: float
    median: float
    p95: float
    longest: int
    histogram: list[list[int]]
    """First length, last length and number of chats of each bin."""


class EpochFigures(TypedDict):
    """Steps and padding of one training epoch with batches of a given size."""

    batch_tokens: int
    steps: int
    padding: float


class CacheFigures(TypedDict):
    """Statistics of a cache, as `stats --json` writes them."""

    chats: int
    tokens: int
    response_tokens: int | None
    """None if the parts have been removed; likewise prompt_tokens."""
    prompt_tokens: int | None
    shards: int
    bytes: int
    row_groups: int
    bytes_per_token: TokenBytes
    compression_ratio: float
    lengths: LengthFigures
    capture_padding: float
    """Fraction of padding in the row groups as the target processed them."""
    epoch: EpochFigures
    hidden_rms: dict[str, float]


def cache_statistics(store: CacheStore, manifest: Manifest, batch_tokens: int) -> CacheFigures:
    """Compute the statistics of a complete cache, ready for JSON.

    Args:
        store: the cache; its shards are not read.
        manifest: its manifest.
        batch_tokens: maximum tokens per batch of the training epoch whose padding is computed.
    """
    groups = [lengths for shard in manifest.shards.values() for lengths in shard.row_groups]
    lengths = np.array([length for group in groups for length in group], dtype=np.int64)
    columns = {name: column.bytes_per_token for name, column in manifest.columns.items()}
    tokens, size = manifest.num_tokens, sum(shard.bytes for shard in manifest.shards.values())
    responses = _response_tokens(store)
    if responses is not None and responses > tokens:
        raise DataError(f"the tokenised parts and the shards of '{store.uri}' do not match: run verify")
    nominal = sum(columns.values()) + _TOKEN_BYTES
    return {
        "chats": len(lengths),
        "tokens": tokens,
        "response_tokens": responses,
        "prompt_tokens": None if responses is None else tokens - responses,
        "shards": len(manifest.shards),
        "bytes": size,
        "row_groups": len(groups),
        "bytes_per_token": {"columns": columns, "nominal": nominal, "stored": size / max(1, tokens)},
        "compression_ratio": nominal * tokens / max(1, size),
        "lengths": _length_figures(lengths),
        "capture_padding": _padding(groups),
        "epoch": _epoch_figures(manifest, batch_tokens),
        "hidden_rms": {str(depth): value for depth, value in manifest.hidden_rms.items()},
    }


def statistics_lines(figures: CacheFigures) -> list[str]:
    """Format the statistics as lines of text."""
    per_token, lengths, epoch = figures["bytes_per_token"], figures["lengths"], figures["epoch"]
    split = ""
    if figures["response_tokens"] is not None:
        share = figures["response_tokens"] / max(1, figures["tokens"])
        split = f" ({figures['prompt_tokens']:,} prompt, {figures['response_tokens']:,} response: {share:.1%})"
    lines = [
        f"chats      {figures['chats']:,} in {figures['shards']:,} shards, {figures['row_groups']:,} row groups",
        f"tokens     {figures['tokens']:,}{split}",
        f"bytes      {figures['bytes']:,}: {per_token['stored']:,.0f} per token, "
        f"compressed {figures['compression_ratio']:.2f} to 1",
        *(f"  {name:<10} {size:>9,} bytes per token" for name, size in per_token["columns"].items()),
        f"padding    {figures['capture_padding']:.1%} in the row groups as captured, {epoch['padding']:.1%} in a "
        f"training epoch of {epoch['steps']:,} steps of {epoch['batch_tokens']:,} tokens",
        *(f"rms        hidden.{depth}: {value:.4g}" for depth, value in figures["hidden_rms"].items()),
        f"lengths    mean {lengths['mean']:.0f}, median {lengths['median']:.0f}, 95 % below {lengths['p95']:.0f}, "
        f"longest {lengths['longest']}",
    ]
    most = max((count for _, _, count in lengths["histogram"]), default=0) or 1
    for first, last, count in lengths["histogram"]:
        lines.append(f"  {first:>6} - {last:<6} {count:>9,} {'█' * round(_BAR * count / most)}".rstrip())
    return lines


def _response_tokens(store: CacheStore) -> int | None:
    """Count the response tokens; None if the parts, which training does not need, have been removed."""
    parts = store.names("tokens", ".parquet")
    if not parts:
        return None

    def count(name: str) -> int:
        mask = store.read_table(f"tokens/{name}", columns=["response_mask"]).column("response_mask")
        return sum(int(chunk.flatten().true_count) for chunk in mask.chunks)

    return sum(in_threads(count, parts, num_threads=4))


def _length_figures(lengths: np.ndarray) -> LengthFigures:
    if not len(lengths):
        return {"mean": 0.0, "median": 0.0, "p95": 0.0, "longest": 0, "histogram": []}
    longest = int(lengths.max())
    step = -(-longest // _NUM_BINS)
    edges = np.arange(0, longest + step, step)
    counts = np.histogram(lengths, bins=edges + 1)[0]  # bins 1 .. step, step + 1 .. 2 step, ...
    bins = [[int(edge) + 1, int(edge) + step, int(count)] for edge, count in zip(edges, counts, strict=False)]
    return {
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "longest": longest,
        "histogram": bins,
    }


def _padding(batches: list[list[int]]) -> float:
    """Return the fraction of padding if every batch is as wide as its longest chat."""
    padded = sum(max(lengths) * len(lengths) for lengths in batches)
    return 1 - sum(map(sum, batches)) / max(1, padded)


def _epoch_figures(manifest: Manifest, batch_tokens: int) -> EpochFigures:
    all_lengths = manifest.lengths
    plan = plan_epoch(all_lengths, batch_tokens, seed=0, epoch=0, num_data_shards=1)[0]
    batches = []
    for window in plan.windows:
        lengths = [length for shard, group in window.row_groups for length in all_lengths[shard][group]]
        batches += [[lengths[row] for row in rows] for rows in window.batches]
    return {"batch_tokens": batch_tokens, "steps": len(batches), "padding": _padding(batches)}
