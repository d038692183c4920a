"""Projects the number of tokens in a set of chats from a few hundred of them. Torch-free, except for the tokenizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moray.activations.format.schema import CacheConfig
from moray.activations.planning.plan import Workload
from moray.activations.planning.shards import plan_shards
from moray.data.ultrachat import BadRow, ChatChunk, read_chunk
from moray.errors import DataError
from moray.text import ChatTokenizer

NUM_SAMPLES = 400
_NUM_CHUNKS = 16


@dataclass(frozen=True)
class Sample:
    """Tokenised sample of the chats."""

    rows: int
    """Rows sampled, unusable ones included."""
    tokens: list[np.ndarray]
    """Token ids of each usable chat."""


def sample_chats(chunks: Sequence[ChatChunk], tokenizer: ChatTokenizer, max_length: int) -> Sample:
    """Tokenise a few hundred chats, evenly spaced within evenly spaced chunks.

    Raises:
        DataError: none of them is usable.
    """
    chosen = [chunks[index] for index in _spaced(len(chunks), _NUM_CHUNKS)]
    rows = 0
    tokens: list[np.ndarray] = []
    for chunk in chosen:
        wanted = set(_spaced(chunk.num_rows, -(-NUM_SAMPLES // len(chosen))))
        for index, row in enumerate(read_chunk(chunk)):
            if index not in wanted:
                continue
            rows += 1
            if isinstance(row, BadRow):
                continue
            try:
                chat = tokenizer.encode_chat(row.messages, max_length)
            except DataError:
                continue
            if chat.response_mask.any():
                tokens.append(chat.tokens)
    if not tokens:
        raise DataError(f"none of {rows} chats from all over the input has an assistant turn that can be used")
    return Sample(rows, tokens)


def project(sample: Sample, num_rows: int, cache: CacheConfig) -> Workload:
    """Extrapolate the workload of all rows from the sample."""
    lengths = np.array([len(tokens) for tokens in sample.tokens])
    # Unusable chats count as empty, so that the error includes the uncertainty of their number.
    every = np.concatenate([lengths, np.zeros(sample.rows - len(lengths), dtype=lengths.dtype)])
    unseen = max(0.0, 1 - sample.rows / num_rows)
    error = 1.96 * float(every.std()) / math.sqrt(len(every)) / float(every.mean()) * math.sqrt(unseen)
    chats = round(num_rows * len(lengths) / sample.rows)
    tokens = round(num_rows * float(every.mean()))
    # Repeat the sampled chats to fill a part of the usual size, because batches are cut within parts.
    part = np.resize(lengths, min(cache.chats_per_part, chats)).tolist()
    plans = plan_shards("part-00000", part, cache, token_bytes=1)
    batches = [[part[row] for row in batch] for plan in plans for batch in plan.batches]
    padded = sum(max(batch) * len(batch) for batch in batches)
    scale = tokens / sum(part)
    return Workload(num_rows, chats, tokens, round(padded * scale), max(1, round(len(batches) * scale)), error)


def _spaced(number: int, limit: int) -> list[int]:
    """Return at most `limit` evenly spaced indices below `number`."""
    count = min(number, limit)
    return [(2 * index + 1) * number // (2 * count) for index in range(count)]
