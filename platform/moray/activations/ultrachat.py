"""Chats from files: UltraChat in both of its schemas, and the other common shapes, in chunks that can be resumed.

`plan_chunks` looks at the files once and cuts them into pieces with fixed limits; `read_chunk` reads one piece, in
any process, at any time, with the same result. A row that cannot be used is handed back as a `BadRow`, never dropped
in silence; whoever reads counts them against `max_bad_rows`. This module refuses to know tokenizers, Ray and torch.
"""

import bisect
import difflib
import glob
import itertools
import json
import mmap
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from moray.config import Config
from moray.errors import ConfigError, DataError
from moray.text import Message

_HUB = "hub:"
_SUFFIXES = (".jsonl", ".json", ".parquet")
_PROBE_ROWS = 20
_PARQUET_BATCH = 256  # rows decoded at a time: what a reader holds beyond its chunk
_NO_ANSWER = "no assistant turn with text in it"
_ACCEPTED = (
    "accepted are 'messages' or 'conversations' (lists of {role, content} or {from, value}), 'data' (texts of user "
    "and assistant in turn), 'instruction' (+ 'input') with 'output', and 'prompt' with 'completion' or 'response'"
)
_ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
_PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("instruction", "response"))
_IDS = ("prompt_id", "id", "conversation_id", "uuid", "uid", "_id")
# Strings are matched whole, so that brackets inside them do not count.
_JSON_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_parquet_lock = threading.Lock()


class ChatsConfig(Config):
    """Which chats to read.

    Rows are counted as they stand in the files, bad ones included, so that a plan never depends on their contents.
    """

    path: str = Field(description="a file, a folder, a glob pattern, or hub:OWNER/NAME[@REVISION]")
    split: str | None = Field(default=None, description="of a hub data set, or of a folder's file names")
    max_chats: int | None = Field(default=None, ge=1)
    skip_chats: int = Field(default=0, ge=0, description="rows to leave out at the start, such as held-out ones")
    max_bad_rows: int = Field(default=100, ge=0, description="more unusable rows than this stop the job")


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


class _UnusableRowError(Exception):
    """Why a row is no chat; becomes a `BadRow`."""


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
            raise DataError(f"'{whole.file}' holds no row; {_ACCEPTED}")
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
                row = _parse(row)
            uid = f"{chunk.label}#{number}"
            if own_id := next((str(row[key]) for key in _IDS if row.get(key) is not None), ""):
                uid += f"#{own_id[:80]}"
            yield Chat(uid, _messages(row))
        except _UnusableRowError as error:
            yield BadRow(chunk.file, number, str(error))


# --- Which files ---


def _sources(config: ChatsConfig) -> Iterator[ChatChunk]:
    """Every file of a configuration, as a chunk whose rows are not yet known."""
    if config.path.startswith(_HUB):
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
        base, found = path, (file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    elif glob.has_magic(str(path)):
        plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        base = Path(*plain)
        found = base.glob(str(path.relative_to(base)))
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
    num_rows = len(_hub_table(whole.file, whole.split)) if whole.kind == "hub" else _ParquetCursor(whole.file).num_rows
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
        if (opens and depth == 1) or (not opens and depth == 1):
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
    bad = [row for row in rows if isinstance(row, BadRow) and row.reason != _NO_ANSWER]
    if rows and len(bad) == len(rows):
        raise DataError(
            f"none of the first {len(rows)} rows of '{chunk.file}' is a chat; row {bad[0].row}: {bad[0].reason}"
        )


# --- Reading ---


def _read_rows(chunk: ChatChunk) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    if chunk.kind == "hub":
        first = chunk.first_row - 1
        table = _hub_table(chunk.file, chunk.split)[first : first + chunk.num_rows]
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
            rows = _parquet_cursor(chunk.file, chunk.file_bytes).take(chunk.first_row - 1, chunk.num_rows)
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


class _ParquetCursor:
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
        self._batches = iter(self._file.iter_batches(batch_size=_PARQUET_BATCH, row_groups=groups))
        self._batch: Any = None  # the rows of the last batch that nobody has asked for yet
        self._position = self._group_starts[group] if self._group_starts else 0


@lru_cache(maxsize=1)
def _parquet_cursor(path: str, num_bytes: int) -> _ParquetCursor:  # the size tells a rewritten file from the old one
    return _ParquetCursor(path)


@lru_cache(maxsize=1)
def _hub_table(path: str, split: str | None) -> Any:
    """A hub data set whose slices are Arrow tables; it lies memory-mapped in the cache of `datasets`."""
    import datasets

    name, _, revision = path.removeprefix(_HUB).partition("@")
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


# --- Shapes ---


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise _UnusableRowError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError as error:
        raise _UnusableRowError(f"not UTF-8 text: byte {error.start + 1} of the row") from None
    except RecursionError:
        raise _UnusableRowError("not valid JSON: nested too deeply") from None
    if not isinstance(row, dict):
        raise _UnusableRowError(f"a row is a {type(row).__name__}; an object is needed")
    return row


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """The turns of a row of any accepted shape."""
    row = {key: value for key, value in row.items() if value is not None}  # tables have every column in every row
    turns = list(_turns(row))
    if isinstance(row.get("system"), str) and row["system"] and turns and turns[0]["role"] != "system":
        turns.insert(0, _message("system", row["system"], 0))
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        raise _UnusableRowError(_NO_ANSWER)
    return turns


def _turns(row: Mapping[str, Any]) -> Iterable[Message]:
    for key in ("messages", "conversations", "data"):
        if key in row:
            if not isinstance(row[key], list):
                raise _UnusableRowError(f"'{key}' is a {type(row[key]).__name__}; a list of turns is needed")
            if key == "data":
                roles = itertools.cycle(("user", "assistant"))
                return [_message(role, text, number) for number, (role, text) in enumerate(zip(roles, row[key]))]  # noqa: B905
            return [_read_turn(turn, number) for number, turn in enumerate(row[key])]
    for question, answer in _PAIRS:
        if question in row and answer in row:
            asked = row[question]
            if question == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
                asked = f"{asked}\n\n{row['input']}"
            return [_message("user", asked, 0), _message("assistant", row[answer], 1)]
    if "prompt" in row or "instruction" in row:
        raise _UnusableRowError(_NO_ANSWER)
    raise _UnusableRowError(f"unknown shape with keys {', '.join(map(repr, row)) or 'none'}; {_ACCEPTED}")


def _read_turn(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise _UnusableRowError(
            f"turn {number} is a {type(turn).__name__}; {{role, content}} or {{from, value}} is needed"
        )
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise _UnusableRowError(f"turn {number} has the role {name!r}; accepted are {', '.join(_ROLES)}")
    return _message(role, turn.get("content", turn.get("value")), number)


def _message(role: str, content: Any, number: int) -> Message:
    if not isinstance(content, str):
        raise _UnusableRowError(f"turn {number} is a {type(content).__name__}; a text is needed")
    if not content.isascii() and any("\ud800" <= character <= "\udfff" for character in content):
        raise _UnusableRowError(f"turn {number} holds half a surrogate pair, which is no text")
    return Message(role=role, content=content)
