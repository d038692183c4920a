"""A token tree: tokens and parents, flattened level by level with the root first."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenTree:
    """A root (the last emitted token, not yet verified) and the drafted nodes below it.

        index      0     1     2     3     4
        token     the   cat   dog   sat   ran
        parent    -1     0     0     1     1
        depth      0     1     1     2     2

    A parent always comes before its children. `ancestors[i, j]` is True if j is i or an ancestor of i.
    `draft_probs[i]`, if given, is the distribution that node i was actually sampled from; without it, every node is a
    deterministic proposal.
    """

    tokens: Int[Tensor, " nodes"]
    parents: Int[Tensor, " nodes"]
    depths: Int[Tensor, " nodes"]
    ancestors: Bool[Tensor, "nodes nodes"]
    max_depth: int
    draft_probs: Float[Tensor, "nodes vocab"] | None = None
    is_chain: bool = False
    """Whether the tree is known to have one node per level."""
    scores: Float[Tensor, " nodes"] | None = None
    """Cumulative log-probabilities under the drafter, for trees that can be pruned (see `trees.ranking`)."""
    num_empty_levels: int = 0
    """Levels that were drafted below the deepest node, and in which no node was worth keeping."""

    @property
    def num_nodes(self) -> int:
        """Nodes, root included."""
        return self.tokens.shape[0]

    @property
    def num_levels(self) -> int:
        """Levels drafted, including those that hold no node."""
        return self.max_depth + self.num_empty_levels

    def num_kept(self, path_length: int) -> int:
        """How many nodes of the root and an accepted path the drafter expanded one right after the other, starting at
        the root.

        In a chain, all but a leaf; in another tree only the root, because the drafter expands other nodes in between.
        """
        return min(1 + path_length if self.is_chain else 1, self.max_depth)


@dataclass(frozen=True)
class Structure:
    """Parents, depths and ancestors of a tree whose structure is known before its tokens."""

    parents: Int[Tensor, " nodes"]
    depths: Int[Tensor, " nodes"]
    ancestors: Bool[Tensor, "nodes nodes"]

    def first(self, num_nodes: int) -> "Structure":
        """The structure of the first `num_nodes` nodes."""
        return Structure(self.parents[:num_nodes], self.depths[:num_nodes], self.ancestors[:num_nodes, :num_nodes])


def fixed_structure(branching: tuple[int, ...], device: torch.device) -> Structure:
    """The structure of a tree in which every node at depth k has `branching[k]` children."""
    parents, depths = [-1], [0]
    level = [0]
    for depth, width in enumerate(branching, start=1):
        next_level = []
        for parent in level:
            for _ in range(width):
                next_level.append(len(parents))
                parents.append(parent)
                depths.append(depth)
        level = next_level
    return structure_of(parents, depths, device)


def chain_of(tokens: Int[Tensor, " nodes"]) -> TokenTree:
    """A tree whose nodes form a chain, root first."""
    depth = tokens.shape[0] - 1
    structure = fixed_structure((1,) * depth, tokens.device)
    return TokenTree(tokens, structure.parents, structure.depths, structure.ancestors, depth, is_chain=True)


def structure_of(parents: list[int], depths: list[int], device: torch.device) -> Structure:
    """Build a structure from host-side lists."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node in range(1, len(parents)):
        ancestors[node] |= ancestors[parents[node]]
    return Structure(torch.tensor(parents, device=device), torch.tensor(depths, device=device), ancestors.to(device))


class PrefixMask:
    """Preallocated attention mask: every row sees all committed slots plus a block of new ones.

    Holds [rows, capacity] additive values (0 seen, -inf hidden), which attention kernels take as they are. Committing n
    tokens writes n columns and viewing writes only the new block, so the work of a cycle does not grow with the
    sequence.
    """

    def __init__(self, rows: int, capacity: int, like: Tensor) -> None:
        self._data = torch.full((rows, capacity), -torch.inf, dtype=like.dtype, device=like.device)
        self._hidden = torch.tensor(-torch.inf, dtype=like.dtype, device=like.device)
        self._seen = torch.zeros_like(self._hidden)
        self.length = 0
        self._end = 0

    def commit(self, num_tokens: int) -> None:
        """Make `num_tokens` more slots visible to every row."""
        self._data[:, self.length : self.length + num_tokens] = 0
        self.length += num_tokens

    def view(self, block: Bool[Tensor, "new scratch"]) -> Float[Tensor, "1 1 new slots"]:
        """The mask for `new` rows, which see the committed slots and, after them, what `block` allows."""
        new, scratch = block.shape
        end = self.length + scratch
        self._end = max(self._end, end)
        self._data[:new, self.length : end] = torch.where(block, self._seen, self._hidden)
        return self._data[None, None, :new, :end]

    def reset(self) -> None:
        """Forget the committed slots. Only the columns that were written are cleared."""
        self._data[:, : max(self._end, self.length)] = -torch.inf
        self.length = self._end = 0
