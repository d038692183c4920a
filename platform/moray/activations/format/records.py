"""Defines typed records of a cache's JSON files: its plan, and the summary of each tokenised part.

Files outlive the code that wrote them, so a record preserves what was read: a key that the file lacks stays unset and
is left out when the record is written again, and an unknown key of the record itself is kept (one inside `target`,
`chats` or `cache` is refused). The `values` of a record are therefore those of its file, and plans are compared by them
(`CacheStore.begin_or_resume`).
"""

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from moray.activations.format.schema import CacheConfig, Column, bytes_per_token
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetSpec

AnyRecord = TypeVar("AnyRecord", bound="Record")


class Record(BaseModel):
    """Contents of one JSON file of a cache."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())

    @classmethod
    def of(cls: type[AnyRecord], values: Mapping[str, object]) -> AnyRecord:
        """Read a record from plain values.

        Raises:
            ValueError: a value is missing or has the wrong type; names the first one, on one line.
        """
        try:
            # Validate as JSON, where a list may become a tuple: strict validation of Python values refuses that.
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    @property
    def values(self) -> dict[str, JsonValue]:
        """Plain values to write: those that were given, without defaults."""
        return self.model_dump(mode="json", exclude_unset=True)


class PlanRecord(Record):
    """plan.json, and the plan in manifest.json and layout.json: everything that determines a cache's contents."""

    format: int
    target: TargetSpec
    dtype: str | None = None
    """Number format in which the target ran; None in early plans, which did not record it."""
    text_fingerprint: str
    """Fingerprint of the tokenizer and the chat template."""
    content_rule: int | None = None
    """Version of the rule for special tokens in the text of chats; None if the plan is older than the rule."""
    chats: ChatsConfig
    files: dict[str, int]
    """Bytes of every chat file, by its label."""
    cache: CacheConfig
    columns: dict[str, Column]
    """Tap columns, in storage order."""
    shard_token_bytes: int | None = None
    """Bytes per token by which the shards were cut, if columns were added since; see the function of this name."""


class PartSummary(Record):
    """tokens/part-NNNNN.json: summary of one tokenised part."""

    name: str
    bytes: int
    """Size of the part's Parquet file."""
    sha256: str
    chats: int
    dropped: int
    """Chats without an assistant turn."""
    bad: int
    bad_rows: list[str]
    """First bad rows, each with its error."""
    lengths: list[int]
    """Tokens of each chat."""


def shard_token_bytes(plan: PlanRecord) -> int:
    """Return the bytes per token by which a plan's shards were cut: those of its original columns."""
    return plan.shard_token_bytes or bytes_per_token(plan.columns)
