"""How often each token occurs in a cache's responses: over all parts, once, prompts left out."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from moray.activations.format.schema import TOKENS_SCHEMA
from moray.activations.format.store import CacheStore
from moray.activations.reading.token_counts import token_counts

Chat = tuple[list[int], list[int]]
"""Tokens, and 1 where they are the response's."""
PARTS: list[list[Chat]] = [
    [([1, 2, 3, 3], [0, 0, 1, 1]), ([5, 3, 5, 9], [0, 1, 0, 1])],
    [],
    [([9, 9, 9], [0, 0, 0]), ([7], [1]), ([], [])],
    [([3, 8, 2, 2, 2], [1, 0, 1, 0, 1])],
]
COUNTS = [0, 0, 2, 4, 0, 0, 0, 1, 0, 1, 0, 0]


def write_part(store: CacheStore, number: int, chats: list[Chat]) -> None:
    columns = {
        "uid": [f"chat-{number}-{i}" for i in range(len(chats))],
        "tokens": [tokens for tokens, _ in chats],
        "response_mask": [[bool(mark) for mark in mask] for _, mask in chats],
    }
    store.write_table(f"tokens/part-{number:05d}.parquet", pa.table(columns, schema=TOKENS_SCHEMA))
    store.write_json(f"tokens/part-{number:05d}.json", {"rows": len(chats)})


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    store = CacheStore(str(tmp_path / "cache"))
    for number, chats in enumerate(PARTS):
        write_part(store, number, chats)
    return store


def test_responses_of_all_parts_are_counted_and_prompts_are_not(store):
    counts = token_counts(store, len(COUNTS))
    assert counts.tolist() == COUNTS
    assert counts.dtype == np.int64
    assert counts.sum() == sum(sum(mask) for part in PARTS for _, mask in part)


def test_many_chats_are_counted_as_one_by_one(tmp_path):
    """Random chats in several parts, of lengths that no two share the boundaries of."""
    store, rng = CacheStore(str(tmp_path)), np.random.default_rng(0)
    wanted: Counter[int] = Counter()
    for number in range(3):
        chats: list[Chat] = []
        for length in rng.integers(0, 40, size=25).tolist():
            tokens, mask = rng.integers(0, 97, size=length).tolist(), rng.integers(0, 2, size=length).tolist()
            wanted.update(token for token, mark in zip(tokens, mask, strict=True) if mark)
            chats.append((tokens, mask))
        write_part(store, number, chats)
    assert token_counts(store, 97).tolist() == [wanted[token] for token in range(97)]


def test_the_counts_are_kept_beside_the_cache_and_read_again(store, monkeypatch):
    first = token_counts(store, len(COUNTS))
    monkeypatch.setattr(np, "bincount", lambda *_, **__: pytest.fail("counted again"))
    again = token_counts(CacheStore(store.uri), len(COUNTS))
    assert again.tolist() == first.tolist()
    assert again.dtype == first.dtype
    again[0] = 5  # may be written to
    assert token_counts(store, len(COUNTS)).tolist() == COUNTS


def test_a_cache_made_anew_is_counted_anew(store):
    assert token_counts(store, len(COUNTS)).tolist() == COUNTS
    write_part(store, 0, [([1, 2, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1])] * 3)
    assert token_counts(store, len(COUNTS)).tolist() != COUNTS


def test_counts_of_another_vocabulary_are_counted_again(store):
    assert token_counts(store, len(COUNTS)).tolist() == COUNTS
    assert token_counts(store, 20).tolist() == COUNTS + [0] * 8
    assert len(store.read_table("token_counts.parquet")) == 20
    assert token_counts(store, 8).tolist() == COUNTS[:8], "ids beyond are never drafted"


def test_a_cache_without_responses_counts_nothing(tmp_path):
    store = CacheStore(str(tmp_path))
    write_part(store, 0, [([1, 2], [0, 0])])
    assert token_counts(store, 4).tolist() == [0] * 4


def test_files_that_are_no_finished_parts_are_not_counted(store):
    """What a killed job left under its temporary name."""
    whole = Path(store.uri, "tokens/part-00000.parquet")
    whole.with_name("part-00009.parquet.1234abcd.tmp").write_bytes(whole.read_bytes())
    assert token_counts(store, len(COUNTS)).tolist() == COUNTS
