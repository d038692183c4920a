"""Adds columns to committed shards: runs the target over their tokens, encodes, writes and commits."""

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from moray.activations.capture.attempts import MAX_ATTEMPTS, Attempts
from moray.activations.capture.extract import TapEncoder, token_arrays
from moray.activations.format.channels import CHANNELS_FILE, channels_fingerprint, read_channels
from moray.activations.format.row_groups import checked_row_groups, shard_writer
from moray.activations.format.schema import CacheConfig, Column, read_description, shard_schema
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import NEXT, finish_replaced
from moray.activations.planning.shards import only_columns, tap_columns
from moray.errors import DataError
from moray.targets.model import Target

_TEXT = ("uid", "num_tokens", "tokens", "response_mask")


class ShardExtender:
    """Adds missing columns to shards; one instance per actor."""

    def __init__(self, target: Target, store: CacheStore, config: CacheConfig) -> None:
        """
        Args:
            target: target that made the cache.
            store: the cache.
            config: settings with all columns that shards will have.

        Raises:
            DataError: columns are quantised, and their channels are missing.
        """
        self._target = target
        self._store = store
        self._config = config
        self._columns = tap_columns(target.spec, config)
        self._channels = read_channels(store, self._columns)
        self._schema = shard_schema(self._columns, channels_fingerprint(self._channels))
        self._attempts = Attempts(store, "shards")

    def extend(self, shard: str) -> ShardInfo:
        """Add the missing columns to one shard, commit it, and return its new marker."""
        for _ in self.extend_in_batches(shard):
            pass
        return self._store.read_marker(shard)

    def extend_in_batches(self, shard: str) -> Iterator[int]:
        """Rewrite one shard with its missing columns and commit it; yield the tokens of each row group once written.

        A shard that has all columns is left unchanged. Memory is bounded by one row group. Old columns keep their
        bytes, and the old file and marker stay until the new ones are complete; in the moment between file and marker,
        a pending marker tells `finish_replaced` how to resume.

        Raises:
            DataError: the target produced a value that is not finite, its replicas die over this shard, or the shard
                is damaged.
            StorageFullError: the disk is full; the shard is unchanged.
        """
        if not self._attempts.begin(shard):
            raise DataError(
                f"{MAX_ATTEMPTS} target replicas died over shard '{shard}' of '{self._store.uri}', out of memory "
                "perhaps: give a smaller num_targets and run the same command again"
            )
        with self._attempts.clearing(shard):
            yield from self._extend(shard)

    def _extend(self, shard: str) -> Iterator[int]:
        finish_replaced(self._store, shard)
        info = self._store.read_marker(shard)
        stored = self._stored(shard)
        if list(stored.items()) == list(self._columns.items()):
            yield info.tokens
            return
        kept = [name for name in self._columns if stored.get(name) == self._columns[name]]
        new = [name for name in self._columns if name not in kept]
        squares: dict[str, float] = {}
        with self._store.open_output(f"shards/{shard}.parquet") as sink:
            with shard_writer(sink, self._schema, self._config.compression) as writer:
                for table in self._row_groups(info, kept, new, squares):
                    writer.write_table(table, row_group_size=table.num_rows)
                    yield int(sum(table.column("num_tokens").to_pylist()))
            sums = info.hidden_square_sums | squares
            sums = {name: sums[name] for name in self._columns if name in sums}
            info = replace(info, bytes=sink.num_bytes, sha256=sink.sha256, hidden_square_sums=sums)
            self._store.write_json(f"shards/{shard}{NEXT}", info.__dict__)
        self._store.commit(info)
        self._store.delete(f"shards/{shard}{NEXT}")

    def _stored(self, shard: str) -> dict[str, Column]:
        """Return codec and width of a shard's columns.

        Raises:
            DataError: they were encoded with channels other than the cache's current ones.
        """
        with self._store.open_shard(shard) as file:
            described = read_description(file.schema_arrow)
        fingerprint = channels_fingerprint(read_channels(self._store, described.columns))
        if fingerprint != described.channels:
            raise DataError(
                f"'{self._store.uri}/{CHANNELS_FILE}' is not the one that shard '{shard}' was written with: put that "
                "back"
            )
        return described.columns

    def _row_groups(
        self, info: ShardInfo, kept: list[str], new: list[str], squares: dict[str, float]
    ) -> Iterator[pa.Table]:
        """Yield the shard's row groups with all columns; add the new ones' sums of mean squares to `squares`."""
        encoder = None
        if new:
            channels = {name: self._channels[name] for name in new if name in self._channels}
            encoder = TapEncoder(self._target, only_columns(self._config, new), channels)
        for table in checked_row_groups(self._store, info, [*_TEXT, *kept]):
            taps: dict[str, pa.Array] = {}
            if encoder is not None:
                taps, sums = encoder.columns_of(token_arrays(table), table.column("uid").to_pylist())
                for name, value in sums.items():
                    squares[name] = squares.get(name, 0.0) + value
            arrays = [taps[name] if name in taps else table.column(name) for name in self._schema.names]
            yield pa.Table.from_arrays(arrays, schema=self._schema)
