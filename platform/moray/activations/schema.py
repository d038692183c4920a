"""What an activation cache looks like on disk. Torch-free.

    <path>/plan.json                 what the cache is made of: target, text, chats, taps, codecs
    <path>/tokens/part-00000.parquet tokenised chats of one chunk of the input (+ .json when complete)
    <path>/shards/00000-00000.parquet  activations, one row per chat, one column per tap and layer
    <path>/shards/00000-00000.json   commit marker: a shard without it does not count
    <path>/manifest.json             all shards with rows, tokens, bytes, sha256; totals and statistics

A shard's row groups are batches of chats of similar length. Columns: uid, num_tokens, tokens,
response_mask, then `kv.00` .. and `hidden.-1` ..: binary, num_tokens x width elements in the codec that the
schema metadata (key `moray`) names.
"""

import json
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from moray.config import Config

FORMAT = 1
METADATA_KEY = b"moray"

CodecName = Literal["bfloat16", "float16", "float32"]


class CacheConfig(Config):
    """What to store of the target, and how."""

    hidden_depths: tuple[int, ...] = (-1, -2, -3)
    """Depths of hidden states: -1 after the final norm, -1-N the input of the last N layers."""
    kv_layers: tuple[int, ...] | None = None
    """Layers whose keys and values are stored; None for all."""
    kv_codec: CodecName = "bfloat16"
    hidden_codec: CodecName = "bfloat16"
    compression: Literal["none", "zstd"] = "none"
    max_length: int = Field(default=2048, ge=2)
    """Chats are truncated to this many tokens, or to the target's context if that is shorter."""
    batch_tokens: int = Field(default=16384, ge=64)
    """Most tokens, padding included, that the target runs at once; also one row group."""
    shard_mib: int = Field(default=256, ge=1)
    """Size at which a shard is closed."""
    chats_per_part: int = Field(default=2048, ge=1)
    """Chats that are read, tokenised and sorted by length together."""


def kv_column(layer: int) -> str:
    """Column of one layer's keys and values."""
    return f"kv.{layer:02d}"


def hidden_column(depth: int) -> str:
    """Column of one depth's hidden states."""
    return f"hidden.{depth}"


def shard_schema(columns: dict[str, dict[str, Any]]) -> pa.Schema:
    """The Arrow schema of a shard.

    Args:
        columns: per tap column its codec and width: {"kv.00": {"codec": "bfloat16", "width": 128}, ...}.
    """
    fields = [
        pa.field("uid", pa.string()),
        pa.field("num_tokens", pa.int32()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("response_mask", pa.list_(pa.bool_())),
        *(pa.field(name, pa.binary()) for name in columns),
    ]
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps({"format": FORMAT, "columns": columns})})


TOKENS_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("response_mask", pa.list_(pa.bool_())),
    ]
)
