"""Counts the tokens in a cache's responses, from which a reduced draft vocabulary is chosen."""

import hashlib
import json

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from moray.activations.format.store import CacheStore

_FILE = "token_counts.parquet"


def token_counts(store: CacheStore, vocab_size: int) -> Int[np.ndarray, " vocab"]:
    """Count each token id in the responses of all cached chats.

    The parts are counted once, one at a time, and the result is stored in the cache's folder; later calls read 8 bytes
    per token id, unless the parts have changed.
    """
    sizes = store.sizes("tokens")
    names = sorted(name for name in sizes if name.endswith(".parquet"))
    parts = hashlib.sha256(json.dumps([(name, sizes[name]) for name in names]).encode()).hexdigest()
    if store.exists(_FILE):
        table = store.read_table(_FILE)
        if table.num_rows == vocab_size and (table.schema.metadata or {}).get(b"parts") == parts.encode():
            return table.column("count").to_numpy().copy()  # Arrow's own memory is read-only
    counts = np.zeros(vocab_size, dtype=np.int64)
    for name in names:
        part = store.read_table(f"tokens/{name}")
        tokens, mask = (part.column(column).combine_chunks().flatten() for column in ("tokens", "response_mask"))
        responses = tokens.to_numpy()[mask.to_numpy(zero_copy_only=False)]
        counts += np.bincount(responses, minlength=vocab_size)[:vocab_size]
    store.write_table(_FILE, pa.table({"count": counts}).replace_schema_metadata({"parts": parts}))
    return counts
