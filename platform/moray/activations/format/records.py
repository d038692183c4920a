"""What a cache's JSON files say, with types: its plan, and what is noted of each tokenised part.

Files outlive the code that wrote them. A record keeps what it was read with: a key that a file lacks stays unset and is
left out when the record is written again, and an unknown key of the record itself is carried along (one inside of
`target`, `chats` or `cache` is refused). So `values` of what was read are the values that were there, and plans are
compared by them (`CacheStore.begin_or_resume`).
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
    """What one JSON file of a cache says."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())

    @classmethod
    def of(cls: type[AnyRecord], values: Mapping[str, object]) -> AnyRecord:
        """Read a record from plain values.

        Raises:
            ValueError: a value is missing or of another type; names the first one on one line.
        """
        try:
            # As JSON, where a list may become a tuple: in Python's own values, strict validation refuses that.
            return cls.model_validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    @property
    def values(self) -> dict[str, JsonValue]:
        """The plain values that are written: those that were given, and no defaults."""
        return self.model_dump(mode="json", exclude_unset=True)


class PlanRecord(Record):
    """plan.json, and the plan in manifest.json and layout.json: all that decides the contents of a cache."""

    format: int
    target: TargetSpec
    dtype: str | None = None
    """Number format in which the target ran; None in the first plans, which did not say."""
    text_fingerprint: str
    """Of the tokenizer and the chat template."""
    content_rule: int | None = None
    """Version of the rule for special tokens in the text of chats; None where the plan is older than the rule."""
    chats: ChatsConfig
    files: dict[str, int]
    """Bytes of every file of chats, by its label."""
    cache: CacheConfig
    columns: dict[str, Column]
    """The tap columns, in the order in which they are stored."""
    shard_token_bytes: int | None = None
    """Bytes of a token with which the shards were cut, where columns have been added since; see the function."""


class PartSummary(Record):
    """tokens/part-NNNNN.json: one tokenised part, and what became of its rows."""

    name: str
    bytes: int
    """Of the part's Parquet file."""
    sha256: str
    chats: int
    dropped: int
    """Chats without an assistant turn."""
    bad: int
    bad_rows: list[str]
    """The first of the bad rows, and what is wrong with each."""
    lengths: list[int]
    """Tokens of each chat."""


def shard_token_bytes(plan: PlanRecord) -> int:
    """Bytes of a token with which the shards of a plan were cut: those of the columns that it began with."""
    return plan.shard_token_bytes or bytes_per_token(plan.columns)
