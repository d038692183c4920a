"""Determines the columns of a cache and assigns its chats to shards. Torch-free."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moray.activations.format.schema import CacheConfig, Column, hidden_column, kv_column
from moray.errors import ConfigError
from moray.targets.spec import TargetSpec


@dataclass(frozen=True)
class ShardPlan:
    """Chats of one shard, as row indices of its part, batch by batch."""

    part: str
    name: str
    batches: list[list[int]]


def tap_columns(spec: TargetSpec, config: CacheConfig) -> dict[str, Column]:
    """Return codec and width of every tap column, in storage order.

    Raises:
        ConfigError: the target lacks a layer or depth, no column is selected, or a codec is given for a column that is
            not stored.
    """
    layers = range(spec.num_layers) if config.kv_layers is None else config.kv_layers
    for layer in layers:
        if not 0 <= layer < spec.num_layers:
            raise ConfigError(f"cache.kv_layers holds {layer}; the target has layers 0 to {spec.num_layers - 1}")
    for depth in config.hidden_depths:
        if not -1 - spec.num_layers <= depth <= -1:
            raise ConfigError(f"cache.hidden_depths holds {depth}; accepted are -1 to {-1 - spec.num_layers}")
    columns = {kv_column(i): Column(config.kv_codec, spec.kv_width) for i in layers}
    for depth in config.hidden_depths:
        columns[hidden_column(depth)] = Column(config.hidden_codec, spec.hidden_size)
    if not columns:
        raise ConfigError("cache.kv_layers and cache.hidden_depths are both empty: there is nothing to cache")
    for name, codec in config.column_codecs.items():
        if name not in columns:
            match = difflib.get_close_matches(name, columns, n=1)
            nearest = f"; did you mean '{match[0]}'?" if match else ""
            raise ConfigError(
                f"cache.column_codecs names '{name}', which is not cached; there are {listed(columns)}{nearest}"
            )
        columns[name] = replace(columns[name], codec=codec)
    return columns


def only_columns(config: CacheConfig, names: Iterable[str]) -> CacheConfig:
    """Return the configuration with only these tap columns and their codecs; all other settings stay."""
    names = list(names)
    numbers: dict[str, list[int]] = {"kv": [], "hidden": []}
    for name in names:
        kind, _, number = name.partition(".")
        numbers[kind].append(int(number))
    codecs = {name: codec for name, codec in config.column_codecs.items() if name in names}
    taps = {"kv_layers": tuple(numbers["kv"]), "hidden_depths": tuple(numbers["hidden"])}
    return config.model_copy(update=taps | {"column_codecs": codecs})


def listed(columns: Iterable[str]) -> str:
    """Join column names for a message; of more than three kv columns, only the first and the last."""
    columns = list(columns)
    kv = [name for name in columns if name.startswith("kv.")]
    kv = [kv[0], "...", kv[-1]] if len(kv) > 3 else kv
    return ", ".join([*kv, *(name for name in columns if not name.startswith("kv."))])


def plan_shards(part: str, lengths: Sequence[int], config: CacheConfig, token_bytes: int) -> list[ShardPlan]:
    """Group the chats of a part into batches of similar length, and the batches into shards.

    Deterministic, so that a resumed job finds the same shards. Padding stays small because chats in a batch are
    neighbours in length; a chat longer than the budget gets a batch of its own.
    """
    order = np.argsort(np.asarray(lengths), kind="stable").tolist()
    batches: list[list[int]] = []
    current: list[int] = []
    for row in reversed(order):  # longest first: the first chat of a batch sets its width
        if current and lengths[current[0]] * (len(current) + 1) > config.batch_tokens:
            batches.append(current)
            current = []
        current.append(row)
    if current:
        batches.append(current)
    shards: list[ShardPlan] = []
    pending: list[list[int]] = []
    pending_bytes = 0
    for batch in batches:
        pending.append(batch)
        pending_bytes += token_bytes * sum(lengths[row] for row in batch)
        if pending_bytes >= config.shard_mib << 20:
            shards.append(ShardPlan(part, f"{part.removeprefix('part-')}-{len(shards):05d}", pending))
            pending, pending_bytes = [], 0
    if pending:
        shards.append(ShardPlan(part, f"{part.removeprefix('part-')}-{len(shards):05d}", pending))
    return shards
