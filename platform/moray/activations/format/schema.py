"""Defines the files and columns of an activation cache. Torch-free.

    <path>/plan.json                 what the cache is made of: target, text, chats, taps, codecs
    <path>/tokens/part-00000.parquet tokenised chats of one chunk of the input (+ .json when complete)
    <path>/forecast.json             forecast of the size and duration, made before the first shard was written
    <path>/channels.parquet          offset and scale of every channel of the quantised columns, if there are any
    <path>/shards/00000-00000.parquet  activations, one row per chat, one column per tap and layer
    <path>/shards/00000-00000.json   commit marker: a shard without it does not count
    <path>/adding.json               exists while columns are being added: their names (briefly also shards/NAME.next)
    <path>/manifest.json             all shards with rows, tokens, bytes, sha256; totals and statistics

A shard's row groups are batches of chats of similar length. Columns: uid, num_tokens, tokens,
response_mask, then `kv.00` .. and `hidden.-1` ..: binary, num_tokens times a fixed number of bytes, in the codec that
the schema metadata (key `moray`) names:

    bfloat16, float16, float32   width little-endian elements
    fp8, int8, int4              a float32 scale, then width elements: float8 e4m3; int8; 4 bits with an offset of 8,
                                 the first of two in the lower half of its byte, the last of an odd width alone

    value[channel] = element[channel] * scale of the token * scale[channel] + offset[channel]

with the channels' scales and offsets from channels.parquet (columns: column, offset, scale; one row per tap column).
If the scale of a token is 0, all its values are 0: the token skips this layer of a sparse target.

Columns may be added later: shards are then rewritten one by one, with their existing columns unchanged. Until all
shards have the new columns, plan and manifest name only the old ones, so readers must select columns by name and ignore
others. Afterwards, the plan's `shard_token_bytes` records the bytes per token by which the shards were originally cut.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import pyarrow as pa
from pydantic import Field, JsonValue

from moray.config import Config

FORMAT = 1
METADATA_KEY = b"moray"

CodecName = Literal["bfloat16", "float16", "float32", "fp8", "int8", "int4"]
BITS: dict[str, int] = {"bfloat16": 16, "float16": 16, "float32": 32, "fp8": 8, "int8": 8, "int4": 4}
QUANTISED = ("fp8", "int8", "int4")
"""Codecs with a scale per token, and with channels."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class Column:
    """Codec and width of one tap column."""

    codec: CodecName
    width: int
    """Values per token."""

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes per token."""
        return codec_bytes(self.codec, self.width)


@dataclass(frozen=True)
class ShardDescription:
    """Description of a shard in the metadata of its schema."""

    columns: dict[str, Column]
    channels: str | None
    """Fingerprint of the channels that encoded its quantised columns; None if it has none."""


class CacheConfig(Config):
    """Activations of the target to store, and their format."""

    hidden_depths: tuple[int, ...] = (-1, -2, -3)
    """Depths of the stored hidden states: -1 after the final norm, -1-N the input of the last N layers."""
    kv_layers: tuple[int, ...] | None = None
    """Indices of the layers whose keys and values are stored, from 0; null for all layers."""
    kv_codec: CodecName = "bfloat16"
    """Number format of stored keys and values: 32, 16, 8 (fp8, int8) or 4 (int4) bits per element."""
    hidden_codec: CodecName = "bfloat16"
    """Number format of stored hidden states, with the same choices as kv_codec."""
    column_codecs: dict[str, CodecName] = Field(default_factory=dict)
    """Formats of single columns that differ from the two above, such as {hidden.-1: bfloat16, kv.00: int8}."""
    compression: Literal["none", "zstd"] = "none"
    """Compression of the shards on top of their number formats; none for no compression."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Maximum size of the whole cache in bytes; null for no limit. A plan that needs more is refused before anything is
    cached."""
    max_length: int = Field(default=2048, ge=2)
    """Maximum tokens per chat; longer chats, or chats beyond the target's context, are truncated."""
    batch_tokens: int = Field(default=16384, ge=64)
    """Maximum tokens, padding included, of one batch of the target, which becomes one row group."""
    shard_mib: int = Field(default=256, ge=1, le=4096)
    """Size in MiB at which a shard is closed and the next one begins."""
    chats_per_part: int = Field(default=2048, ge=1)
    """Number of chats that are read, tokenised and sorted by length together."""

    @property
    def for_plan(self) -> dict[str, JsonValue]:
        """Settings that make one cache differ from another; a quota does not."""
        left_out = {"max_bytes"} | (set() if self.column_codecs else {"column_codecs"})
        return self.model_dump(mode="json", exclude=left_out)


def kv_column(layer: int) -> str:
    """Return the column name of one layer's keys and values."""
    return f"kv.{layer:02d}"


def hidden_column(depth: int) -> str:
    """Return the column name of one depth's hidden states."""
    return f"hidden.{depth}"


def bytes_per_token(columns: Mapping[str, Column]) -> int:
    """Return the stored bytes per token, without compression and Parquet's own overhead."""
    return sum(column.bytes_per_token for column in columns.values())


def codec_bytes(name: str, width: int) -> int:
    """Return the bytes that a codec uses for every token of `width` values."""
    return (width * BITS[name] + 7) // 8 + (SCALE_BYTES if name in QUANTISED else 0)


def column_values(columns: Mapping[str, Column]) -> dict[str, dict[str, str | int]]:
    """Convert columns to JSON values: {"kv.00": {"codec": "bfloat16", "width": 128}, ...}."""
    return {name: asdict(column) for name, column in columns.items()}


def shard_schema(columns: Mapping[str, Column], channels: str | None = None) -> pa.Schema:
    """Return the Arrow schema of a shard.

    Args:
        columns: tap columns, in storage order.
        channels: fingerprint of the channels that encoded the quantised columns.
    """
    fields = [
        pa.field("uid", pa.string()),
        pa.field("num_tokens", pa.int32()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("response_mask", pa.list_(pa.bool_())),
        *(pa.field(name, pa.binary()) for name in columns),
    ]
    described = {"format": FORMAT, "columns": column_values(columns)} | ({"channels": channels} if channels else {})
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps(described)})


def read_description(schema: pa.Schema) -> ShardDescription:
    """Read the description of a shard from its schema."""
    described = json.loads(schema.metadata[METADATA_KEY])
    columns = {name: Column(column["codec"], column["width"]) for name, column in described["columns"].items()}
    return ShardDescription(columns, described.get("channels"))


TOKENS_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("response_mask", pa.list_(pa.bool_())),
    ]
)
