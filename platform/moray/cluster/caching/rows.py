"""The rows that caching sends through Ray Data: a dataclass for each kind, and how rows become columns and back.

To Ray Data a row is a dictionary, and a batch is a dictionary with one array for each column. Batch functions turn what
they get into the dataclasses below and what they return back into a batch, so that their types say what goes in and
out. A field is a column; a value that Arrow has no type for (a chunk, a plan, a summary) travels pickled.
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
"""Rows as Ray Data hands them to a function and takes them back: an array for each column."""


@dataclass(frozen=True)
class TableRow:
    """What all kinds of rows have in common: a field is a column."""


AnyRow = TypeVar("AnyRow", bound=TableRow)


@dataclass(frozen=True)
class ChunkRow(TableRow):
    """A chunk of the input that is to become a part: of tokens, or of answered chats."""

    name: str
    """Of the part."""
    chunk: ChatChunk


@dataclass(frozen=True)
class PartRow(TableRow):
    """A part that has been tokenised and written."""

    summary: PartSummary


@dataclass(frozen=True)
class AnsweredRow(TableRow):
    """A part whose chats the target has answered."""

    name: str
    """Of the part."""
    summary: AnswerSummary


@dataclass(frozen=True)
class ShardPlanRow(TableRow):
    """A shard that is to be written."""

    plan: ShardPlan


@dataclass(frozen=True)
class ShardRow(TableRow):
    """A shard that is there and is to get more columns."""

    shard: str


@dataclass(frozen=True)
class TokensRow(TableRow):
    """Tokens that the target has run over since the last such row of the same shard."""

    tokens: int


@dataclass(frozen=True)
class GroupRow(TableRow):
    """Shards that are to be joined, by their names."""

    shards: list[str]


@dataclass(frozen=True)
class JoinedRow(TableRow):
    """Shards that have been joined: how many there were."""

    num_shards: int


def dataset_of(rows: Sequence[TableRow]) -> ray.data.Dataset:
    """A data set of rows of one kind, each a block of its own: one task or one call of an actor.

    So are the rows that a batch function yields: they reach the driver at once, not when the function returns.
    """
    dataset = ray.data.from_items([_columns(row) for row in rows], override_num_blocks=len(rows))
    dataset.context.target_max_block_size = 1  # bytes; Ray Data collects smaller outputs until a task ends
    return dataset


def token_rows(counts: Iterable[int], num_counts: int) -> Iterator[Batch]:
    """At most eight batches of one `TokensRow`, which together say what `counts` says.

    One for each count would make a fast target wait: Ray Data lets a task be only a few blocks ahead of the driver. A
    task that is repeated after the death of its actor must yield the same rows again, so no clock decides.

    Args:
        counts: tokens of each batch of a shard.
        num_counts: how many batches there are at most.
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
    """The rows of a batch."""
    columns = [batch[field.name] for field in fields(kind)]
    return [kind(*map(_plain, values)) for values in zip(*columns, strict=True)]


def batch_of(rows: Sequence[TableRow]) -> Batch:
    """Rows of one kind as a batch."""
    batch: Batch = {}
    for name in _columns(rows[0]):
        batch[name] = np.empty(len(rows), dtype=object)
        for index, row in enumerate(rows):  # one by one, or NumPy would look into lists
            batch[name][index] = getattr(row, name)
    return batch


def rows_from(dataset: ray.data.Dataset, kind: type[AnyRow]) -> Iterator[AnyRow]:
    """The rows of a data set as they are made."""
    for row in dataset.iter_rows():
        yield kind(**{name: _plain(value) for name, value in row.items()})


def _columns(row: TableRow) -> dict[str, object]:
    """A row's fields; unlike `asdict`, what they hold stays whole."""
    return {field.name: getattr(row, field.name) for field in fields(row)}


def _plain(value: object) -> object:
    """Numbers, texts and lists of Python's own in place of NumPy's."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value
