"""Chats from files: UltraChat in both of its schemas, and the other common shapes, in chunks that can be resumed.

`plan_chunks` looks at the files once and cuts them into pieces with fixed limits; `read_chunk` reads one piece, in
any process, at any time, with the same result. A row that cannot be used is handed back as a `BadRow`, never dropped
in silence; whoever reads counts them against `max_bad_rows`. This module refuses to know tokenizers, Ray and torch.
"""

import difflib
import glob
import itertools
import mmap
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from moray.config import Config
from moray.data.chat_shapes import ACCEPTED, NO_ANSWER, UnusableRowError, parse_row, row_id, row_messages
from moray.data.chat_tables import HUB, ParquetCursor, hub_table, parquet_cursor
from moray.errors import ConfigError, DataError
from moray.text import Message

_SUFFIXES = (".jsonl", ".json", ".parquet")
_PROBE_ROWS = 20
# Strings are matched whole, so that brackets inside them do not count.
_JSON_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
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


class _Extent(NamedTuple):
    """Where one row of a JSON file lies."""

    row: int
    start: int
    end: int


def plan_chunks(config: ChatsConfig, chats_per_chunk: int = 1024) -> list[ChatChunk]:
    """Cut the chats of a configuration into chunks, in file order.

    JSON files are scanned once for line or element limits; of Parquet files only the footer is read. Scanning stops
    once `max_chats` rows are found.

    Raises:
        ConfigError: for a path, split or number that cannot be used.
        DataError: for an empty file, or one in which none of the first rows is a chat.
    """
    if chats_per_chunk < 1:
        raise ConfigError(f"chats_per_chunk is {chats_per_chunk}; it must be at least 1")
    chunks: list[ChatChunk] = []
    skip, left = config.skip_chats, config.max_chats
    for whole in _sources(config):
        if left == 0:
            break
        num_rows = 0
        extents = _extents(whole, skip, left)
        while taken := list(itertools.islice(extents, chats_per_chunk)):
            first, last = taken[0], taken[-1]
            chunks.append(
                replace(
                    whole,
                    index=len(chunks),
                    first_row=first.row,
                    num_rows=len(taken),
                    start=first.start,
                    end=last.end,
                )
            )
            num_rows += len(taken)
        if num_rows:
            _probe(chunks[-1 - (num_rows - 1) // chats_per_chunk])
            skip = 0
        elif skip:
            skip -= sum(1 for _ in _extents(whole, 0, skip))
        else:
            raise DataError(f"'{whole.file}' holds no row; {ACCEPTED}")
        left = None if left is None else left - num_rows
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


# --- Which files ---


def _sources(config: ChatsConfig) -> Iterator[ChatChunk]:
    """Every file of a configuration, as a chunk whose rows are not yet known."""
    if config.path.startswith(HUB):
        yield ChatChunk(0, config.path, config.path, "hub", 1, 0, split=config.split)
        return
    for file, label in _find_files(config):
        if file.suffix == ".parquet":
            kind = "parquet"
        else:
            with file.open("rb") as stream:
                kind = "array" if stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[" else "lines"
        yield ChatChunk(0, str(file), label, kind, 1, 0, file_bytes=file.stat().st_size)


def _find_files(config: ChatsConfig) -> list[tuple[Path, str]]:
    """Files in a fixed order, each with its name below the folder that was asked for."""
    path = Path(config.path).expanduser()
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(
                f"chats.path is '{path}', whose suffix is unknown; accepted are {', '.join(_SUFFIXES)}: "
                "decompress or convert it first"
            )
        if config.split is not None:
            raise ConfigError(f"chats.split is '{config.split}', but '{path}' is a single file; set split to null")
        return [(path, path.name)]
    if path.is_dir():
        if (path / "plan.yaml").is_file() and not (path / "summary.yaml").is_file():
            raise DataError(
                f"chats.path '{path}' holds unfinished answers: run pipelines.regenerate again until it ends"
            )
        base, found = path, (file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    elif glob.has_magic(str(path)):
        plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        base = Path(*plain)
        found = itertools.chain.from_iterable(
            (file for file in match.rglob("*") if file.suffix in _SUFFIXES) if match.is_dir() else [match]
            for match in base.glob(str(path.relative_to(base)))
        )
    else:
        raise ConfigError(f"chats.path '{config.path}' does not exist{_nearest(path)}")
    files = [(file, str(file.relative_to(base))) for file in sorted(found) if file.is_file()]
    files = [(file, label) for file, label in files if not any(part.startswith(".") for part in Path(label).parts)]
    unknown = next((file for file, _ in files if file.suffix not in _SUFFIXES), None)
    if unknown is not None:
        raise ConfigError(f"chats.path '{config.path}' matches '{unknown}'; accepted are {', '.join(_SUFFIXES)}")
    if config.split is not None:
        in_split = re.compile(rf"(^|/){re.escape(config.split)}([-./]|$)")
        names = ", ".join(label for _, label in files[:8])
        files = [(file, label) for file, label in files if in_split.search(label)]
        if names and not files:
            raise ConfigError(
                f"chats.split is '{config.split}', which no file of '{config.path}' is named for: {names}"
            )
    if not files:
        raise ConfigError(f"chats.path '{config.path}' holds no {', '.join(_SUFFIXES)} file")
    return files


def _nearest(path: Path) -> str:
    names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    return f"; did you mean '{path.parent / match[0]}'?" if match else ""


# --- Which rows ---


def _extents(whole: ChatChunk, skip: int, limit: int | None) -> Iterator[_Extent]:
    stop = None if limit is None else skip + limit
    if whole.kind == "lines":
        return itertools.islice(_line_extents(whole.file), skip, stop)
    if whole.kind == "array":
        return itertools.islice(_array_extents(whole.file), skip, stop)
    num_rows = len(hub_table(whole.file, whole.split)) if whole.kind == "hub" else ParquetCursor(whole.file).num_rows
    return (_Extent(row + 1, 0, 0) for row in range(num_rows)[skip:stop])


def _line_extents(file: str) -> Iterator[_Extent]:
    """Lines end at b"\\n" alone: texts hold U+2028 and others that str.splitlines would cut at."""
    position = 0
    with Path(file).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _Extent(number, position, position + len(line))
            position += len(line)


def _array_extents(file: str) -> Iterator[_Extent]:
    with Path(file).open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        for number, (start, end) in enumerate(_array_elements(buffer, file), start=1):
            yield _Extent(number, start, end)


def _array_elements(buffer: mmap.mmap | bytes, file: str) -> Iterator[tuple[int, int]]:
    """Where the objects of a JSON array lie, found by brackets alone: what is in them is parsed later."""
    depth = begin = behind = 0
    for token in _JSON_TOKEN.finditer(buffer):
        character = buffer[token.start() : token.start() + 1]
        if character == b'"':
            continue
        opens = character in (b"[", b"{")
        if depth == 1:
            if buffer[behind : token.start()].strip(b" \t\r\n,"):
                raise DataError(
                    f"'{file}' is a JSON array with something else than objects before byte {token.start()}"
                )
            begin = token.start()
        depth += 1 if opens else -1
        if opens and depth == 1:
            behind = token.end()
        elif not opens and depth == 1:
            behind = token.end()
            yield begin, behind
        elif depth == 0:
            return
    raise DataError(f"'{file}' is a JSON array that does not end; the file seems cut off")


def _probe(chunk: ChatChunk) -> None:
    """Refuse at once a file that holds something else than chats."""
    rows = list(itertools.islice(read_chunk(chunk), _PROBE_ROWS))
    bad = [row for row in rows if isinstance(row, BadRow) and row.reason != NO_ANSWER]
    if rows and len(bad) == len(rows):
        raise DataError(
            f"none of the first {len(rows)} rows of '{chunk.file}' is a chat; row {bad[0].row}: {bad[0].reason}"
        )


# --- Reading ---


def _read_rows(chunk: ChatChunk) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    if chunk.kind == "hub":
        first = chunk.first_row - 1
        table = hub_table(chunk.file, chunk.split)[first : first + chunk.num_rows]
        yield from enumerate(table.to_pylist(), start=chunk.first_row)
        return
    try:
        num_bytes = Path(chunk.file).stat().st_size
    except OSError as error:
        raise DataError(f"chat file '{chunk.file}' cannot be read: {error.strerror}") from None
    if num_bytes != chunk.file_bytes:
        raise DataError(
            f"'{chunk.file}' has {num_bytes} bytes, but had {chunk.file_bytes} when the chats were planned; plan again"
        )
    if chunk.kind == "parquet":
        with _parquet_lock:
            rows = parquet_cursor(chunk.file, chunk.file_bytes).take(chunk.first_row - 1, chunk.num_rows)
        yield from enumerate(rows, start=chunk.first_row)
        return
    with Path(chunk.file).open("rb") as stream:
        stream.seek(chunk.start)
        if chunk.kind == "array":
            piece = b"[" + stream.read(chunk.end - chunk.start) + b"]"
            for number, (start, end) in enumerate(_array_elements(piece, chunk.file), start=chunk.first_row):
                yield number, piece[start:end]
            return
        position = chunk.start
        for number, line in enumerate(stream, start=chunk.first_row):
            if position >= chunk.end:
                return
            position += len(line)
            if line.strip():
                yield number, line
