"""Rows of chats in tables: ranges of rows of Parquet files and of data sets from the hub.

This module refuses to know what is in a row.
"""

import bisect
import itertools
from functools import lru_cache
from typing import Any

from moray.errors import ConfigError, DataError

HUB = "hub:"
_BATCH_ROWS = 256  # rows decoded at a time: what a reader holds beyond its chunk


class ParquetCursor:
    """Reads ranges of rows, going on from where the last range ended.

    Row groups can be large and cannot be entered in the middle; a reader that takes its chunks in order decodes
    each row once.
    """

    def __init__(self, path: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False)
        except pa.ArrowException as error:
            raise DataError(f"'{path}' is no readable Parquet file: {' '.join(str(error).split())}") from None
        metadata = self._file.metadata
        self.num_rows: int = metadata.num_rows
        counts = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._group_starts = list(itertools.accumulate(counts, initial=0))[:-1]
        self._seek(0)

    def take(self, first: int, count: int) -> list[dict[str, Any]]:
        """Rows [first, first + count), counted from 0."""
        import pyarrow as pa

        group = bisect.bisect_right(self._group_starts, first) - 1
        if first < self._position or self._group_starts[group] > self._position:
            self._seek(group)
        rows: list[dict[str, Any]] = []
        try:
            while len(rows) < count:
                if self._batch is None:
                    self._batch = next(self._batches)
                skip = min(max(first - self._position, 0), self._batch.num_rows)
                piece = self._batch.slice(skip, count - len(rows))
                rows.extend(piece.to_pylist())
                used = skip + piece.num_rows
                self._position += used
                self._batch = self._batch.slice(used) if used < self._batch.num_rows else None
        except (StopIteration, pa.ArrowException) as error:
            raise DataError(f"'{self._path}' is damaged near row {self._position + 1}: {error}") from None
        return rows

    def _seek(self, group: int) -> None:
        groups = list(range(group, len(self._group_starts)))
        self._batches = iter(self._file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups))
        self._batch: Any = None  # the rows of the last batch that have not been asked for yet
        self._position = self._group_starts[group] if self._group_starts else 0


@lru_cache(maxsize=1)
def parquet_cursor(path: str, num_bytes: int) -> ParquetCursor:
    """This process's cursor on a file; the size tells a rewritten file from the old one."""
    return ParquetCursor(path)


@lru_cache(maxsize=1)
def hub_table(path: str, split: str | None) -> Any:
    """A hub data set whose slices are Arrow tables; it lies memory-mapped in the cache of `datasets`."""
    import datasets

    name, _, revision = path.removeprefix(HUB).partition("@")
    try:
        splits = datasets.load_dataset(name, revision=revision or None)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"chats.path '{path}' cannot be loaded: {' '.join(str(error).split())[:300]}; "
            "give hub:OWNER/NAME[@REVISION], or a local file"
        ) from None
    chosen = next(iter(splits)) if split is None and len(splits) == 1 else split
    if chosen not in splits:
        raise ConfigError(f"chats.split is {split or 'null'}, but '{path}' has: {', '.join(map(str, splits))}")
    return splits[chosen].with_format("arrow")
