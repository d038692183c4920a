"""Defines a dataclass for each kind of row that caching sends through Ray Data, and converts rows to columns and back.

In Ray Data, a row is a dictionary, and a batch is a dictionary with one array per column. Batch functions convert their
input to the dataclasses below and their output back to a batch, so that types document both. Each field is a column; a
value for which Arrow has no type (a chunk, a plan, a summary) is pickled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import ray.data

from moray.activations.format.records import PartSummary
from moray.activations.planning.shards import ShardPlan
from moray.cluster.caching.answer_store import AnswerSummary
from moray.data.ultrachat import ChatChunk

_ROWS_PER_SHARD = 8

Batch = dict[str, np.ndarray]
"""Rows as Ray Data passes them to a function and back: one array per column."""


@dataclass(frozen=True)
class TableRow:
    """Base class of all rows; each field is a column."""


AnyRow = TypeVar("AnyRow", bound=TableRow)


@dataclass(frozen=True)
class ChunkRow(TableRow):
    """Chunk of the input that becomes a part, of tokens or of answered chats."""

    name: str
    """Name of the part."""
    chunk: ChatChunk


@dataclass(frozen=True)
class PartRow(TableRow):
    """Part that has been tokenised and written."""

    summary: PartSummary


@dataclass(frozen=True)
class AnsweredRow(TableRow):
    """Part whose chats the target has answered."""

    name: str
    """Name of the part."""
    summary: AnswerSummary


@dataclass(frozen=True)
class ShardPlanRow(TableRow):
    """Shard to write."""

    plan: ShardPlan


@dataclass(frozen=True)
class ShardRow(TableRow):
    """Existing shard to which columns are added."""

    shard: str


@dataclass(frozen=True)
class TokensRow(TableRow):
    """Number of tokens that the target has processed since the last such row of the same shard."""

    tokens: int


@dataclass(frozen=True)
class GroupRow(TableRow):
    """Names of shards to join."""

    shards: list[str]


@dataclass(frozen=True)
class JoinedRow(TableRow):
    """Number of shards that have been joined."""

    num_shards: int


def dataset_of(rows: Sequence[TableRow]) -> ray.data.Dataset:
    """Create a data set of rows of one kind, each in its own block: one task or actor call per row.

    Each row that a batch function yields is also a block, so it reaches the driver at once, not when the function
    returns.
    """
    dataset = ray.data.from_items([_columns(row) for row in rows], override_num_blocks=len(rows))
    dataset.context.target_max_block_size = 1  # bytes; Ray Data buffers smaller outputs until a task ends
    return dataset


def token_rows(counts: Iterable[int], num_counts: int) -> Iterator[Batch]:
    """Yield at most eight batches of one `TokensRow` each, which add up to `counts`.

    One batch per count would stall a fast target: Ray Data lets a task be only a few blocks ahead of the driver. A task
    that is repeated after its actor died must yield the same rows again, so they are not timed by a clock.

    Args:
        counts: tokens of each batch of a shard.
        num_counts: maximum number of counts.
    """
    every, tokens = -(-num_counts // _ROWS_PER_SHARD), 0
    for number, count in enumerate(counts, start=1):
        tokens += count
        if number % every == 0:
            yield batch_of([TokensRow(tokens)])
            tokens = 0
    if tokens:
        yield batch_of([TokensRow(tokens)])


def rows_of(batch: Batch, kind: type[AnyRow]) -> list[AnyRow]:
    """Convert a batch to rows."""
    columns = [batch[field.name] for field in fields(kind)]
    return [kind(*map(_plain, values)) for values in zip(*columns, strict=True)]


def batch_of(rows: Sequence[TableRow]) -> Batch:
    """Convert rows of one kind to a batch."""
    batch: Batch = {}
    for name in _columns(rows[0]):
        batch[name] = np.empty(len(rows), dtype=object)
        for index, row in enumerate(rows):  # one by one, or NumPy would unpack lists
            batch[name][index] = getattr(row, name)
    return batch


def rows_from(dataset: ray.data.Dataset, kind: type[AnyRow]) -> Iterator[AnyRow]:
    """Yield the rows of a data set as they are produced."""
    for row in dataset.iter_rows():
        yield kind(**{name: _plain(value) for name, value in row.items()})


def _columns(row: TableRow) -> dict[str, object]:
    """Return a row's fields; unlike `asdict`, it does not convert the values."""
    return {field.name: getattr(row, field.name) for field in fields(row)}


def _plain(value: object) -> object:
    """Convert NumPy scalars and arrays to Python numbers, strings and lists."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value
