"""The rows that one draft step computes for several sequences, concatenated.

sequence     0          1        2
rows         k k n n n  n n n    k n n n      k: pending verified tokens (at depth 0 only)
nodes            n n n  n n n      n n n      n: nodes to score, the same number for each sequence
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.drafters.common.attention import KVBuffer, Reach
from moray.drafters.common.layers import Rotary, RotaryTable
from moray.drafters.common.slots import DraftSlots


class Rows:
    """The rows of some sequences, which creating this object adds to the slots of each."""

    def __init__(
        self,
        slots: Sequence[DraftSlots],
        nodes: Int[Tensor, "sequences new"],
        ancestors: Bool[Tensor, "#sequences new expanded"] | None,
        depth: int,
    ) -> None:
        """See `DraftSlots.expand`."""
        seen = [None] * len(slots) if ancestors is None else ancestors.expand(len(slots), -1, -1).unbind()
        self.parts = [own.expand(new, sees, depth) for own, new, sees in zip(slots, nodes.unbind(), seen, strict=True)]
        self.has_known = any(part.num_known for part in self.parts)
        self._num_nodes = nodes.shape[1]
        tokens = [part.tokens for part in self.parts]
        self.tokens: Int[Tensor, " rows"] = tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def reach(self, caches: Sequence[KVBuffer]) -> list[Reach]:
        """What each sequence's nodes see; only keys and values of verified tokens are needed."""
        return [
            Reach(cache, part.slot, part.tokens.shape[0], part.num_known, part.mask)
            for cache, part in zip(caches, self.parts, strict=True)
        ]

    def reach_of_all(self, caches: Sequence[KVBuffer]) -> list[Reach]:
        """Like `reach`, if another layer also reads the output for verified tokens."""
        return [
            Reach(cache, part.slot, part.tokens.shape[0], 0, part.causal)
            for cache, part in zip(caches, self.parts, strict=True)
        ]

    def split(self, x: Float[Tensor, "1 nodes width"]) -> tuple[Float[Tensor, "1 new width"], ...]:
        """Split a tensor with the nodes of all sequences by sequence."""
        return (x,) if len(self.parts) == 1 else x.split(self._num_nodes, dim=1)

    @cached_property
    def node_positions(self) -> Int[Tensor, "sequences new"]:
        """Positions of the nodes in their sequences."""
        positions = on_device(self.tokens.device, [part.position for part in self.parts])
        return positions[:, None].expand(-1, self._num_nodes)

    def rotary(self, table: RotaryTable) -> Rotary:
        """Rotations of all rows."""
        if len(self.parts) == 1:
            return table.rows(*self.parts[0].positions)
        if not self.has_known:
            return table.at(self.node_positions.flatten())
        spans = [range(part.position - part.num_known, part.position + 1) for part in self.parts]
        return table.at(on_device(self.tokens.device, [position for span in spans for position in span]))

    def node_rotary(self, table: RotaryTable) -> Rotary:
        """Rotations of the nodes."""
        if len(self.parts) == 1:
            return table.rows(self.parts[0].position, self.parts[0].position + 1)
        return table.at(self.node_positions.flatten())


def on_device(device: torch.device, values: list[int] | list[float]) -> Tensor:
    """Values as a tensor; copying them to a GPU does not wait for it."""
    return torch.tensor(values, dtype=None if values else torch.long).to(device, non_blocking=True)
