"""From tokenised chats to a shard of activations: plan the batches, run the target, encode, write, commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from torch import Tensor

from moray.activations.codec import codec
from moray.activations.schema import CacheConfig, hidden_column, kv_column, shard_schema
from moray.activations.store import CacheStore, ShardInfo
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.targets.spec import TargetSpec


@dataclass(frozen=True)
class ShardPlan:
    """Which chats of which part make one shard: rows of the part, batch by batch."""

    part: str
    name: str
    batches: list[list[int]]


def tap_columns(spec: TargetSpec, config: CacheConfig) -> dict[str, dict[str, Any]]:
    """Codec and width of every tap column, in the order they are stored.

    Raises:
        ConfigError: a layer or depth that the target does not have.
    """
    layers = range(spec.num_layers) if config.kv_layers is None else config.kv_layers
    for layer in layers:
        if not 0 <= layer < spec.num_layers:
            raise ConfigError(f"cache.kv_layers holds {layer}; the target has layers 0 to {spec.num_layers - 1}")
    for depth in config.hidden_depths:
        if not -1 - spec.num_layers <= depth <= -1:
            raise ConfigError(f"cache.hidden_depths holds {depth}; accepted are -1 to {-1 - spec.num_layers}")
    columns = {kv_column(i): {"codec": config.kv_codec, "width": spec.kv_width} for i in layers}
    for depth in config.hidden_depths:
        columns[hidden_column(depth)] = {"codec": config.hidden_codec, "width": spec.hidden_size}
    return columns


def bytes_per_token(columns: dict[str, dict[str, Any]]) -> int:
    """Stored bytes of one token, compression and Parquet's own overhead aside."""
    return sum(codec(column["codec"]).bytes_per_token(column["width"]) for column in columns.values())


def plan_shards(part: str, lengths: Sequence[int], config: CacheConfig, token_bytes: int) -> list[ShardPlan]:
    """Cut a part into batches of similar length and those into shards.

    Deterministic, so that a resumed job finds the same shards. Padding waste stays small because a batch
    holds neighbours in length; a chat longer than the budget makes a batch of its own.
    """
    order = np.argsort(np.asarray(lengths), kind="stable").tolist()
    batches: list[list[int]] = []
    current: list[int] = []
    for row in reversed(order):  # longest first: the first of a batch sets its width
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
            shards.append(ShardPlan(part, f"{part[-5:]}-{len(shards):05d}", pending))
            pending, pending_bytes = [], 0
    if pending:
        shards.append(ShardPlan(part, f"{part[-5:]}-{len(shards):05d}", pending))
    return shards


class ShardWriter:
    """Runs the target over planned shards and writes them; one per actor."""

    def __init__(self, target: Target, store: CacheStore, config: CacheConfig) -> None:
        self._target = target
        self._store = store
        self._config = config
        self._columns = tap_columns(target.spec, config)
        self._depths = tuple(config.hidden_depths)
        self._part_name = ""
        self._part: pa.Table | None = None

    def write(self, plan: ShardPlan) -> ShardInfo:
        """Write and commit one shard; bounded memory: one batch at a time.

        Raises:
            DataError: the target produced a value that is not finite.
        """
        part = self._read_part(plan.part)
        schema = shard_schema(self._columns)
        squares = dict.fromkeys((hidden_column(depth) for depth in self._depths), 0.0)
        row_groups: list[list[int]] = []
        compression = self._config.compression
        options: dict[str, Any] = {"compression": compression, "use_dictionary": False, "write_page_checksum": True}
        with self._store.open_output(f"shards/{plan.name}.parquet") as sink:
            with pq.ParquetWriter(sink, schema, **options) as writer:
                for rows in plan.batches:
                    batch = part.take(pa.array(rows))
                    table = self._run(batch, schema, squares)
                    writer.write_table(table, row_group_size=len(rows))
                    row_groups.append(table.column("num_tokens").to_pylist())
            num_bytes, digest = sink.num_bytes, sink.sha256
        tokens = sum(map(sum, row_groups))
        info = ShardInfo(plan.name, sum(map(len, row_groups)), tokens, num_bytes, digest, row_groups, squares)
        self._store.commit(info)
        return info

    def _read_part(self, name: str) -> pa.Table:
        if self._part is None or name != self._part_name:
            self._part, self._part_name = self._store.read_table(f"tokens/{name}.parquet"), name
        return self._part

    def _run(self, batch: pa.Table, schema: pa.Schema, squares: dict[str, float]) -> pa.Table:
        tokens = [np.asarray(row, dtype=np.int64) for row in batch.column("tokens").to_numpy()]
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        taps = self._taps(tokens, lengths)
        arrays: list[pa.Array] = [
            batch.column("uid").combine_chunks(),
            pa.array(lengths),
            batch.column("tokens").combine_chunks(),
            batch.column("response_mask").combine_chunks(),
        ]
        for name, values in taps.items():
            if not bool(torch.isfinite(values).all()):
                uid = _first_not_finite(values, lengths, batch.column("uid").to_pylist())
                raise DataError(f"column '{name}' of chat '{uid}' is not finite; try target.dtype=float32")
            if name in squares:
                squares[name] += float(values.float().pow(2).mean(dim=1).sum())
            arrays.append(self._encode(name, values, lengths))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _taps(self, tokens: list[np.ndarray], lengths: np.ndarray) -> dict[str, Float[Tensor, "tokens width"]]:
        """Taps of all tokens of a padded batch, padding already dropped, chats one after the other."""
        target = self._target
        rows, width = len(tokens), int(lengths.max())
        padded = np.zeros((rows, width), dtype=np.int64)
        for row, ids in enumerate(tokens):
            padded[row, : len(ids)] = ids
        cache = target.new_cache(width, batch=rows)
        positions = torch.arange(width, device=target.device).expand(rows, width)
        # Padding stands behind the tokens, where causality already hides it.
        mask = torch.ones(width, width, dtype=torch.bool, device=target.device).tril()[None, None]
        output = target.forward(torch.from_numpy(padded).to(target.device), positions, mask, cache, self._depths)
        valid = torch.from_numpy(np.arange(width) < lengths[:, None]).to(target.device)
        layers = range(target.spec.num_layers) if self._config.kv_layers is None else self._config.kv_layers
        taps: dict[str, Tensor] = {}
        for layer in layers:
            pair = cache.data[layer].permute(1, 3, 2, 0, 4)  # batch, seq, kv heads, [k ; v], head_dim
            taps[kv_column(layer)] = pair[valid].flatten(1)
        for depth in self._depths:
            taps[hidden_column(depth)] = output.hidden[depth][valid]
        return taps

    def _encode(self, name: str, values: Float[Tensor, "tokens width"], lengths: np.ndarray) -> pa.Array:
        column = self._columns[name]
        chosen = codec(column["codec"])
        size = chosen.bytes_per_token(column["width"])
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * size
        if offsets[-1] >= 1 << 31:
            raise ConfigError(f"cache.batch_tokens makes a column of {offsets[-1]} bytes; 2 GiB is the most: lower it")
        data = chosen.encode(values).cpu().numpy()
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        return pa.BinaryArray.from_buffers(pa.binary(), len(lengths), buffers)


def _first_not_finite(values: Tensor, lengths: np.ndarray, uids: list[str]) -> str:
    token = int((~torch.isfinite(values)).any(dim=1).nonzero()[0])
    return uids[int(np.searchsorted(np.cumsum(lengths), token, side="right"))]
