"""Chats shuffled and packed into one small Parquet file: prompts for the target to answer, or its answers to keep."""

import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from moray.config import Config
from moray.data.ultrachat import BadRow, Chat, ChatsConfig, plan_chunks, read_chunk
from moray.errors import DataError

_SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("prompt_id", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)
"""UltraChat's."""
_LEVEL = 22
"""Of zstd: the file is written once and fetched often."""


class PackConfig(Config):
    """Which chats, and how many of them."""

    chats: ChatsConfig
    output: Path
    """Parquet file to write, in UltraChat's schema."""
    seed: int = 0
    """Seed of the shuffle."""
    distinct: bool = False
    """Keep one chat of several with the same first question. For prompts that the target is to answer."""
    min_chars: int = Field(default=1, ge=1)
    """Fewest characters of a chat's first question; chats with fewer are left out."""
    max_chars: int | None = Field(default=None, ge=1)
    """Most characters of a chat's first question; chats with more are left out; null for no limit."""
    max_packed: int | None = Field(default=None, ge=1)
    """Most chats of the file; null for all."""
    max_bytes: int | None = Field(default=None, ge=1024)
    """Most bytes of the file: as many chats as fit; null for no limit."""


def pack_chats(config: PackConfig) -> dict[str, int]:
    """Read, filter, shuffle and write.

    Returns:
        Number of chats "read", "packed" and "bad", and "bytes" of the file.

    Raises:
        DataError: no chat is left, too many rows are bad, or not one chat fits.
    """
    chats: list[Chat] = []
    seen: set[str] = set()
    bad: list[BadRow] = []
    num_read = 0
    for chunk in plan_chunks(config.chats):
        for row in read_chunk(chunk):
            if isinstance(row, BadRow):
                bad.append(row)
                if len(bad) > config.chats.max_bad_rows:
                    raise DataError(
                        f"{len(bad)} rows cannot be used (chats.max_bad_rows allows fewer); the last: {row}"
                    )
                continue
            num_read += 1
            question = _question(row)
            if config.min_chars <= len(question) <= (config.max_chars or len(question)) and question not in seen:
                chats.append(row)
                if config.distinct:
                    seen.add(question)
    random.Random(config.seed).shuffle(chats)
    chats = chats[: config.max_packed]
    if not chats:
        raise DataError(
            f"of {num_read} chats of '{config.chats.path}' none is left: give other min_chars and max_chars"
        )
    packed = _fit(chats, config.max_bytes)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    partial = config.output.with_name(config.output.name + ".tmp")
    partial.write_bytes(packed[1])
    partial.replace(config.output)
    return {"read": num_read, "packed": packed[0], "bad": len(bad), "bytes": len(packed[1])}


def _question(chat: Chat) -> str:
    """What the user asks first."""
    return next((message["content"] for message in chat.messages if message["role"] == "user"), "")


def _fit(chats: list[Chat], max_bytes: int | None) -> tuple[int, bytes]:
    """As many chats as the file may hold, from the first on, and the file."""
    content = _write(chats)
    if max_bytes is None or len(content) <= max_bytes:
        return len(chats), content
    few, many = 0, len(chats)  # it fits with few, and does not with many
    fitting = b""
    while many - few > 1:
        middle = (few + many) // 2
        content = _write(chats[:middle])
        if len(content) <= max_bytes:
            few, fitting = middle, content
        else:
            many = middle
    if not few:
        raise DataError(f"max_bytes is {max_bytes}, but one chat takes {len(content)}: give a larger one")
    return few, fitting


def _write(chats: list[Chat]) -> bytes:
    rows: list[dict[str, Any]] = [
        {"prompt": _question(chat), "prompt_id": chat.uid, "messages": chat.messages} for chat in chats
    ]
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    pq.write_table(table, sink, compression="zstd", compression_level=_LEVEL, row_group_size=len(rows))
    return sink.getvalue()
