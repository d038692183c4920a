"""Where a drafter keeps keys and values while it drafts one sequence.

slot    0 .. length-1        length .. length+expanded-1
holds   verified tokens      the tree's expanded nodes, overwritten by the next tree
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moray.trees.tree import PrefixMask

EXTEND_CHUNK = 64
"""Most verified tokens whose attention is computed at once, for drafters of several layers."""


class DraftSlots:
    """Counts the slots that all of a drafter's caches share, and masks them. Nothing is allocated after the start."""

    def __init__(self, capacity: int, max_expanded: int, like: Tensor, rows: int = 0) -> None:
        """
        Args:
            capacity: most verified tokens.
            max_expanded: most nodes of a tree that the drafter expands.
            like: gives type and device.
            rows: most tokens that are masked at once, if more than `max_expanded`.
        """
        self.num_slots = capacity + max_expanded
        self.length = 0
        self._num_expanded = 0
        self._like = like
        self._mask = PrefixMask(max(max_expanded, rows), self.num_slots, like)
        self._lower = torch.ones(rows, rows, dtype=torch.bool, device=like.device).tril()

    def new_cache(self, num_kv_heads: int, head_dim: int) -> Float[Tensor, "2 1 kv_heads slots head_dim"]:
        """Keys and values of one attention."""
        return self._like.new_zeros(2, 1, num_kv_heads, self.num_slots, head_dim)

    def commit(self, num_tokens: int) -> int:
        """Add verified tokens; returns the slot of the first one."""
        start = self.length
        self._mask.commit(num_tokens)
        self.length += num_tokens
        return start

    def causal(self, num_tokens: int) -> Float[Tensor, "1 1 new slots"] | None:
        """What tokens that are about to be committed see: all before them and themselves (None: everything)."""
        return None if num_tokens == 1 else self._mask.view(self._lower[:num_tokens, :num_tokens])

    def expand(
        self, num_nodes: int, ancestors: Bool[Tensor, "new expanded"] | None, depth: int
    ) -> tuple[int, Float[Tensor, "1 1 new slots"] | None]:
        """Add nodes at `depth` of the running tree (0 begins a new one).

        Returns:
            the slot of the first one, and what they see of all slots up to their own (None: everything).
        """
        if depth == 0:
            self._num_expanded = 0
        start = self.length + self._num_expanded
        self._num_expanded += num_nodes
        return start, None if ancestors is None else self._mask.view(ancestors)

    def reset(self) -> None:
        """Forget everything."""
        self.length = self._num_expanded = 0
        self._mask.reset()
