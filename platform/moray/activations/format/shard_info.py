"""A committed shard, in the words of its marker and of the manifest."""

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
    """Per hidden column, the sum over tokens of the mean square: gives the rms a drafter scales by."""
    made_of: list[str] = field(default_factory=list)
    """Names of the planned shards that a compacted shard was made of; empty for a planned shard itself."""

    @property
    def planned(self) -> frozenset[str]:
        """Names of the planned shards whose chats it holds."""
        return frozenset(self.made_of or [self.name])
