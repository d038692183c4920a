"""Describes a committed shard, as in its marker and in the manifest."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ShardInfo:
    """A committed shard, as its marker and the manifest describe it."""

    name: str
    rows: int
    tokens: int
    bytes: int
    sha256: str
    row_groups: list[list[int]]
    """Lengths of the chats in each row group."""
    hidden_square_sums: dict[str, float]
    """Sum of the mean square over all tokens, by hidden column; gives the RMS by which a drafter scales."""
    made_of: list[str] = field(default_factory=list)
    """Names of the planned shards that make up a compacted shard; empty for a planned shard."""

    @property
    def planned(self) -> frozenset[str]:
        """Names of the planned shards whose chats it holds."""
        return frozenset(self.made_of or [self.name])
