"""Turns planned chats into shards of activations: runs the target, encodes, writes and commits."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from moray.activations.capture.attempts import MAX_ATTEMPTS, Attempts
from moray.activations.capture.record import record_taps
from moray.activations.format.channels import (
    Channels,
    ChannelStatistics,
    channels_fingerprint,
    quantised_columns,
    read_channels,
)
from moray.activations.format.codec import codec
from moray.activations.format.row_groups import shard_writer
from moray.activations.format.schema import CacheConfig, hidden_column, shard_schema
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.activations.planning.shards import ShardPlan, tap_columns
from moray.errors import ConfigError, DataError
from moray.targets.model import Target


class TapEncoder:
    """Runs the target over chats and encodes its taps on the target's device: only bytes are copied to the host."""

    def __init__(self, target: Target, config: CacheConfig, channels: Channels) -> None:
        self.columns = tap_columns(target.spec, config)
        self.hidden = [hidden_column(depth) for depth in config.hidden_depths]
        self._target = target
        self._config = config
        self._channels = {name: column.to(target.device) for name, column in channels.items()}

    @torch.inference_mode()
    def encode(
        self, tokens: Sequence[np.ndarray]
    ) -> tuple[dict[str, UInt8[Tensor, "tokens bytes"]], dict[str, Bool[Tensor, " tokens"]], dict[str, float]]:
        """Return by column the bytes on the host, which tokens are finite, and (hidden columns) sums of mean squares.

        The host waits for the device once per batch, regardless of the number of columns.
        """
        encoded: dict[str, Tensor] = {}
        is_finite: dict[str, Tensor] = {}
        squares: dict[str, Tensor] = {}
        for name, values in record_taps(self._target, self._config, tokens):
            chosen = codec(self.columns[name].codec)
            is_finite[name] = chosen.can_hold(values)
            if name in self.hidden:
                squares[name] = values.float().square().mean(dim=1)
            encoded[name] = _to_host(chosen.encode(values, self._channels.get(name)))
        # Copies complete in order: these two come last, so the bytes have arrived when they have.
        sums = torch.stack([value.sum() for value in squares.values()]).tolist() if squares else []
        finite = dict(zip(is_finite, torch.stack(list(is_finite.values())).cpu(), strict=True))
        return encoded, finite, dict(zip(squares, sums, strict=True))

    def columns_of(
        self, tokens: Sequence[np.ndarray], uids: list[str]
    ) -> tuple[dict[str, pa.BinaryArray], dict[str, float]]:
        """Return the tap columns of chats, one value per chat, and the sums of mean squares per hidden column.

        Raises:
            DataError: the target produced a value that is not finite.
            ConfigError: a column of the chats reaches 2 GiB, the limit of an Arrow binary array.
        """
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        self._check_size(int(lengths.sum()))
        encoded, finite, sums = self.encode(tokens)
        for name, is_finite in finite.items():
            if not bool(is_finite.all()):
                uid = _first_not_finite(is_finite, lengths, uids)
                stored = self.columns[name].codec
                raise DataError(
                    f"column '{name}' of chat '{uid}' is not finite as {stored}: give another output and "
                    "target.dtype=float32, and if float16 is what it is stored in, bfloat16 instead"
                )
        return {name: _binary(data, lengths) for name, data in encoded.items()}, sums

    def _check_size(self, num_tokens: int) -> None:
        size = num_tokens * max(column.bytes_per_token for column in self.columns.values())
        if size >= 1 << 31:
            raise ConfigError(f"cache.batch_tokens makes a column of {size} bytes; 2 GiB is the most: lower it")


class ShardWriter:
    """Writes planned shards; one instance per actor."""

    def __init__(self, target: Target, store: CacheStore, config: CacheConfig) -> None:
        """
        Raises:
            DataError: columns are quantised, and their channels have not been measured yet (see `find_channels`).
        """
        self._store = store
        self._config = config
        channels = read_channels(store, tap_columns(target.spec, config))
        self._encoder = TapEncoder(target, config, channels)
        self._schema = shard_schema(self._encoder.columns, channels_fingerprint(channels))
        self._attempts = Attempts(store, "shards")
        self._part_name = ""
        self._part: pa.Table | None = None

    def write(self, plan: ShardPlan) -> ShardInfo:
        """Write one shard, commit it, and return its marker."""
        for _ in self.write_in_batches(plan):
            pass
        return self._store.read_marker(plan.name)

    def write_in_batches(self, plan: ShardPlan) -> Iterator[int]:
        """Write one shard in bounded memory and commit it; yield the tokens of each batch once written.

        Raises:
            DataError: the target produced a value that is not finite, or its replicas die over this shard.
            StorageFullError: the disk is full; nothing of the shard is left.
        """
        if not self._attempts.begin(plan.name):
            raise DataError(
                f"{MAX_ATTEMPTS} target replicas died over shard '{plan.name}' of '{self._store.uri}', out of memory "
                "perhaps: give a smaller num_targets and run the same command again, or a smaller cache.batch_tokens "
                "and another output"
            )
        with self._attempts.clearing(plan.name):
            yield from self._write(plan)

    def _write(self, plan: ShardPlan) -> Iterator[int]:
        part = self._read_part(plan.part)
        squares = dict.fromkeys(self._encoder.hidden, 0.0)
        row_groups: list[list[int]] = []
        with self._store.open_output(f"shards/{plan.name}.parquet") as sink:
            with shard_writer(sink, self._schema, self._config.compression) as writer:
                for rows in plan.batches:
                    batch = part.take(pa.array(rows))
                    table = self._run(batch, squares)
                    writer.write_table(table, row_group_size=len(rows))
                    row_groups.append(table.column("num_tokens").to_pylist())
                    yield sum(row_groups[-1])
            num_bytes, digest = sink.num_bytes, sink.sha256
        tokens = sum(map(sum, row_groups))
        info = ShardInfo(plan.name, sum(map(len, row_groups)), tokens, num_bytes, digest, row_groups, squares)
        self._store.commit(info)

    def compute(self, plan: ShardPlan, batch: int) -> pa.Table:
        """Compute one row group of a planned shard, as it would be written.

        Raises:
            DataError: the target produced a value that is not finite.
        """
        rows = self._read_part(plan.part).take(pa.array(plan.batches[batch]))
        return self._run(rows, dict.fromkeys(self._encoder.hidden, 0.0))

    def _read_part(self, name: str) -> pa.Table:
        if self._part is None or name != self._part_name:
            self._part, self._part_name = self._store.read_table(f"tokens/{name}.parquet"), name
        return self._part

    def _run(self, batch: pa.Table, squares: dict[str, float]) -> pa.Table:
        tokens = token_arrays(batch)
        taps, sums = self._encoder.columns_of(tokens, batch.column("uid").to_pylist())
        for name, value in sums.items():
            squares[name] += value
        arrays: list[pa.Array] = [
            batch.column("uid").combine_chunks(),
            pa.array(np.array([len(row) for row in tokens], dtype=np.int32)),
            batch.column("tokens").combine_chunks(),
            batch.column("response_mask").combine_chunks(),
            *taps.values(),
        ]
        return pa.Table.from_arrays(arrays, schema=self._schema)


@torch.inference_mode()
def find_channels(target: Target, config: CacheConfig, batches: Sequence[Sequence[np.ndarray]]) -> Channels:
    """Measure the channels of the quantised columns from the target's taps on some batches.

    Raises:
        DataError: the target produced a value that is not finite.
    """
    statistics = {name: ChannelStatistics() for name in quantised_columns(tap_columns(target.spec, config))}
    for tokens in batches:
        for name, values in record_taps(target, config, tokens):
            if name in statistics:
                statistics[name].add(values)
    channels = {name: column.channels() for name, column in statistics.items()}
    for name, column in channels.items():
        if not bool(torch.isfinite(column.offset).all() & torch.isfinite(column.scale).all()):
            raise DataError(f"column '{name}' is not finite in some chats; try target.dtype=float32 and another output")
    return channels


def token_arrays(rows: pa.Table) -> list[np.ndarray]:
    """Return the token ids of every chat."""
    return [np.asarray(row, dtype=np.int64) for row in rows.column("tokens").to_numpy()]


def _to_host(data: UInt8[Tensor, "tokens bytes"]) -> UInt8[Tensor, "tokens bytes"]:
    """Start the copy to host memory; it is complete after the next synchronisation with the device."""
    if data.device.type == "cpu":
        return data
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data, non_blocking=True)


def _binary(data: UInt8[Tensor, "tokens bytes"], lengths: np.ndarray) -> pa.Array:
    """Return one binary value per chat, without a copy."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * data.shape[1]
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data.numpy())]
    return pa.BinaryArray.from_buffers(pa.binary(), len(lengths), buffers)


def _first_not_finite(is_finite: Tensor, lengths: np.ndarray, uids: list[str]) -> str:
    token = int((~is_finite).nonzero()[0])
    return uids[int(np.searchsorted(np.cumsum(lengths), token, side="right"))]
