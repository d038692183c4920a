"""Where a drafter stores keys and values while it drafts one sequence.

slot    0 .. length-1        length .. length+pending-1       after them
holds   verified tokens      verified tokens to be computed   the tree's expanded nodes, overwritten by the next tree
                             along with the next root

The nodes of an accepted chain are already in the slots of the verified tokens that they have become. Missing tokens (a
leaf, a tree's path) are pending until the next root, so that they need no pass of their own; a prompt is computed at
once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.trees.tree import PrefixMask

EXTEND_CHUNK = 64
"""Maximum number of verified tokens that are computed at once."""


@dataclass(frozen=True)
class Expansion:
    """What one draft step computes: pending verified tokens (at depth 0 only), then the nodes to score."""

    tokens: Int[Tensor, " rows"]
    num_known: int
    """How many of the rows are verified tokens, which do not have to be scored."""
    slot: int
    """Slot of the first row."""
    position: int
    """Position of the nodes: the number of verified tokens plus the depth."""
    mask: Float[Tensor, "1 1 nodes slots"] | None
    """What the nodes see of all slots up to their own (None: everything)."""
    causal: Float[Tensor, "1 1 rows slots"] | None
    """The same for all rows; only if the slots are for drafters with several layers."""

    @property
    def positions(self) -> tuple[int, int]:
        """First position of the rows, and one past the last: verified tokens ascend, nodes share the last position."""
        return self.position - self.num_known, self.position + 1


class DraftSlots:
    """Manages the slots that all caches of a drafter share, and their mask. Nothing is allocated after construction."""

    def __init__(self, capacity: int, max_expanded: int, like: Tensor, is_layered: bool = False) -> None:
        """
        Args:
            capacity: maximum number of verified tokens.
            max_expanded: maximum number of nodes of a tree that the drafter expands.
            like: gives dtype and device.
            is_layered: whether verified tokens need attention too, because a layer above reads their output.
        """
        self.num_slots = capacity + max_expanded
        self.length = 0
        self._none = torch.empty(0, dtype=torch.long, device=like.device)
        self._pending = self._none
        self._is_computed = False
        self._num_expanded = 0
        self._like = like
        rows = EXTEND_CHUNK if is_layered else 0
        self._mask = PrefixMask(max(max_expanded, rows), self.num_slots, like)
        self._lower = torch.ones(rows, rows, dtype=torch.bool, device=like.device).tril()

    def new_cache(self, num_kv_heads: int, head_dim: int) -> Float[Tensor, "2 1 kv_heads slots head_dim"]:
        """An empty buffer for the keys and values of one attention."""
        return self._like.new_zeros(2, 1, num_kv_heads, self.num_slots, head_dim)

    @property
    def num_verified(self) -> int:
        """Verified tokens, including pending ones."""
        return self.length + self._pending.shape[0]

    def extend(
        self, tokens: Int[Tensor, " new"], num_kept: int, remember: Callable[[Int[Tensor, " some"], int], None]
    ) -> None:
        """Add verified tokens.

        Args:
            tokens: in order.
            num_kept: how many of them, from the first on, are already in their slots (see `Drafter.extend`).
            remember: remember(some, start) computes keys and values of some tokens, whose slots begin at `start`.
        """
        self._commit_computed()
        if self._pending.shape[0]:  # no draft has computed them
            self._remember(self._pending, remember)
        self._commit(num_kept)
        missing = tokens[num_kept:]
        if num_kept and missing.shape[0] < EXTEND_CHUNK:
            self._pending = missing
        else:  # a prompt, or a token after a cycle without a draft
            self._remember(missing, remember)

    def _remember(self, tokens: Int[Tensor, " some"], remember: Callable[[Int[Tensor, " some"], int], None]) -> None:
        for chunk in tokens.split(EXTEND_CHUNK) if tokens.shape[0] else ():
            remember(chunk, self.length)
            self._commit(chunk.shape[0])
        self._pending = self._none

    def causal(self, num_tokens: int) -> Float[Tensor, "1 1 new slots"] | None:
        """What new verified tokens see: all tokens before them and themselves (None: everything)."""
        return None if num_tokens == 1 else self._mask.view(self._lower[:num_tokens, :num_tokens])

    def expand(
        self, nodes: Int[Tensor, " nodes"], ancestors: Bool[Tensor, "nodes expanded"] | None, depth: int
    ) -> Expansion:
        """Add nodes at `depth` of the current tree; depth 0 starts a new tree with its root."""
        self._commit_computed()
        if depth > 0:
            start, position = self.length + self._num_expanded, self.length + depth
            self._num_expanded += nodes.shape[0]
            mask = None if ancestors is None else self._mask.view(ancestors)
            return Expansion(nodes, 0, start, position, mask, mask)
        self._num_expanded = 1
        self._is_computed = True  # the caller's step computes the pending tokens
        start, known = self.length, self._pending.shape[0]
        if not known:
            return Expansion(nodes, 0, start, start, None, None)
        causal = self.causal(known + 1) if self._lower.shape[0] else None
        return Expansion(torch.cat([self._pending, nodes]), known, start, start + known, None, causal)

    def reset(self) -> None:
        """Forget everything."""
        self.length = self._num_expanded = 0
        self._pending, self._is_computed = self._none, False
        self._mask.reset()

    def _commit_computed(self) -> None:
        """Commit the pending tokens if they were computed with the root."""
        if self._is_computed:
            self._is_computed = False
            self._commit(self._pending.shape[0])
            self._pending = self._none

    def _commit(self, num_tokens: int) -> None:
        if num_tokens:
            self._mask.commit(num_tokens)
            self.length += num_tokens
