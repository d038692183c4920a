"""Chats from files: UltraChat in both of its schemas, and the other common shapes, in chunks that can be resumed.

`plan_chunks` looks at the files once and cuts them into pieces with fixed limits; `read_chunk` reads one piece, in
any process, at any time, with the same result. A row that cannot be used is returned as a `BadRow` and never dropped in
silence; the caller counts such rows against `max_bad_rows`. This module knows neither tokenizers nor Ray nor torch.
"""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from moray.config import Config
from moray.data.chat_files import find_files
from moray.data.chat_shapes import ACCEPTED, NO_ANSWER, UnusableRowError, parse_row, row_id, row_messages
from moray.data.chat_tables import HUB, ParquetCursor, hub_table, parquet_cursor
from moray.data.json_rows import Extent, array_elements, array_extents, is_array, line_extents
from moray.errors import ConfigError, DataError
from moray.text import Message

_PROBE_ROWS = 20
_parquet_lock = threading.Lock()


class ChatsConfig(Config):
    """Which chats to read.

    Rows are counted as they are in the files, bad ones included, so that a plan does not depend on their contents.
    """

    path: str
    """Where the chats are: a file, a folder, a glob pattern of both, or hub:OWNER/NAME[@REVISION]."""
    split: str | None = None
    """Split of a hub data set, or in the names of a folder's files; null for the only one, or all files."""
    max_chats: int | None = Field(default=None, ge=1)
    """Most rows to read, bad ones included; null for all."""
    skip_chats: int = Field(default=0, ge=0)
    """Rows to leave out at the start, such as held-out ones."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Unusable rows that are left out; one more stops the job."""


@dataclass(frozen=True)
class ChatChunk:
    """A fixed run of rows of one file; picklable, and the same for the same configuration and files."""

    index: int
    file: str
    label: str  # the file's name in uids and messages: the same on every machine
    kind: Literal["lines", "array", "parquet", "hub"]
    first_row: int  # line, array element or table row, counted from 1
    num_rows: int
    start: int = 0  # bytes [start, end) of a JSON file
    end: int = 0
    file_bytes: int = 0  # to notice a file that changed after planning
    split: str | None = None


@dataclass(frozen=True)
class Chat:
    """One conversation. The uid is unique among the planned files and stable from run to run."""

    uid: str
    messages: list[Message]


class BadRow(NamedTuple):
    """A row that cannot be used: where it stands (line or row, counted from 1) and why."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}"


def plan_chunks(config: ChatsConfig, chats_per_chunk: int = 1024) -> list[ChatChunk]:
    """Cut the chats of a configuration into chunks, in file order.

    JSON files are scanned once for the byte ranges of their rows; of a Parquet file only the footer is read. Scanning
    stops once `max_chats` rows are found.

    Raises:
        ConfigError: for a path, split or number that cannot be used.
        DataError: for an empty file, or one in which none of the first rows is a chat.
    """
    if chats_per_chunk < 1:
        raise ConfigError(f"chats_per_chunk is {chats_per_chunk}; it must be at least 1")
    chunks: list[ChatChunk] = []
    skip, left = config.skip_chats, config.max_chats
    for source in _sources(config):
        if left == 0:
            break
        own = list(_cut(source, skip, left, chats_per_chunk))
        if own:
            _probe(own[0])
            chunks += [replace(chunk, index=len(chunks) + number) for number, chunk in enumerate(own)]
            skip = 0
            left = None if left is None else left - sum(chunk.num_rows for chunk in own)
        elif skip:  # the file is skipped whole
            skip -= sum(1 for _ in _extents(source, 0, skip))
        else:
            raise DataError(f"'{source.file}' holds no row; {ACCEPTED}")
    if not chunks:
        raise DataError(
            f"skip_chats is {config.skip_chats}, but '{config.path}' has only {config.skip_chats - skip} rows"
        )
    return chunks


def read_chunk(chunk: ChatChunk) -> Iterator[Chat | BadRow]:
    """Read the rows of a chunk in order; memory is bounded by the chunk.

    Raises:
        DataError: if the file has changed since it was planned, or is damaged beyond single rows.
    """
    for number, row in _read_rows(chunk):
        try:
            if isinstance(row, bytes):
                row = parse_row(row)
            uid = f"{chunk.label}#{number}"
            if own_id := row_id(row):
                uid += f"#{own_id}"
            yield Chat(uid, row_messages(row))
        except UnusableRowError as error:
            yield BadRow(chunk.file, number, str(error))


# --- Planning ---


def check_files(config: ChatsConfig) -> None:
    """Refuse a path without files of chats; the hub is not asked.

    Raises:
        As `find_files`.
    """
    if not config.path.startswith(HUB):
        find_files(config.path, config.split)


def _sources(config: ChatsConfig) -> Iterator[ChatChunk]:
    """Every file of a configuration, as a chunk whose rows are not yet known."""
    if config.path.startswith(HUB):
        yield ChatChunk(0, config.path, config.path, "hub", 1, 0, split=config.split)
        return
    for path, label in find_files(config.path, config.split):
        kind = "parquet" if path.suffix == ".parquet" else "array" if is_array(path) else "lines"
        yield ChatChunk(0, str(path), label, kind, 1, 0, file_bytes=path.stat().st_size)


def _cut(source: ChatChunk, skip: int, limit: int | None, chats_per_chunk: int) -> Iterator[ChatChunk]:
    """The rows of a file, but the first `skip` and at most `limit`, in chunks."""
    extents = _extents(source, skip, limit)
    while rows := list(itertools.islice(extents, chats_per_chunk)):
        yield replace(source, first_row=rows[0].row, num_rows=len(rows), start=rows[0].start, end=rows[-1].end)


def _extents(source: ChatChunk, skip: int, limit: int | None) -> Iterator[Extent]:
    stop = None if limit is None else skip + limit
    if source.kind == "lines":
        return itertools.islice(line_extents(source.file), skip, stop)
    if source.kind == "array":
        return itertools.islice(array_extents(source.file), skip, stop)
    is_hub = source.kind == "hub"
    num_rows = len(hub_table(source.file, source.split)) if is_hub else ParquetCursor(source.file).num_rows
    return (Extent(row + 1, 0, 0) for row in range(num_rows)[skip:stop])


def _probe(chunk: ChatChunk) -> None:
    """Refuse a file of which none of the first rows is a chat."""
    rows = list(itertools.islice(read_chunk(chunk), _PROBE_ROWS))
    bad = [row for row in rows if isinstance(row, BadRow) and row.reason != NO_ANSWER]
    if rows and len(bad) == len(rows):
        raise DataError(
            f"none of the first {len(rows)} rows of '{chunk.file}' is a chat; row {bad[0].row}: {bad[0].reason}"
        )


# --- Reading ---


def _read_rows(chunk: ChatChunk) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """Number and content of every row: bytes of JSON, or the values of a table's row."""
    if chunk.kind == "hub":
        first = chunk.first_row - 1
        table = hub_table(chunk.file, chunk.split)[first : first + chunk.num_rows]
        return enumerate(table.to_pylist(), start=chunk.first_row)
    _check_unchanged(chunk)
    if chunk.kind == "parquet":
        with _parquet_lock:
            rows = parquet_cursor(chunk.file, chunk.file_bytes).take(chunk.first_row - 1, chunk.num_rows)
        return enumerate(rows, start=chunk.first_row)
    return _array_rows(chunk) if chunk.kind == "array" else _line_rows(chunk)


def _check_unchanged(chunk: ChatChunk) -> None:
    try:
        num_bytes = Path(chunk.file).stat().st_size
    except OSError as error:
        raise DataError(f"chat file '{chunk.file}' cannot be read: {error.strerror}") from None
    if num_bytes != chunk.file_bytes:
        raise DataError(
            f"'{chunk.file}' has {num_bytes} bytes, but had {chunk.file_bytes} when the chats were planned; plan again"
        )


def _array_rows(chunk: ChatChunk) -> Iterator[tuple[int, bytes]]:
    with Path(chunk.file).open("rb") as stream:
        stream.seek(chunk.start)
        elements = b"[" + stream.read(chunk.end - chunk.start) + b"]"
    for number, (start, end) in enumerate(array_elements(elements, chunk.file), start=chunk.first_row):
        yield number, elements[start:end]


def _line_rows(chunk: ChatChunk) -> Iterator[tuple[int, bytes]]:
    with Path(chunk.file).open("rb") as stream:
        stream.seek(chunk.start)
        position = chunk.start
        for number, line in enumerate(stream, start=chunk.first_row):
            if position >= chunk.end:
                return
            position += len(line)
            if line.strip():
                yield number, line
