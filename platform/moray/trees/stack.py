"""Trees of several sequences stacked, so that one target pass can verify all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from moray.trees.tree import TokenTree


@dataclass(frozen=True)
class TreeStack:
    """One tree per row. Smaller trees are padded with nodes that no other node sees and no path leads to.

        tree 0     the   cat   dog            parents   -1   0   0
        tree 1     a     (pad) (pad)          parents   -1  -1  -1

    Padding is token 0 at depth 0, and sees only itself.
    """

    tokens: Int[Tensor, "rows nodes"]
    parents: Int[Tensor, "rows nodes"]
    depths: Int[Tensor, "rows nodes"]
    ancestors: Bool[Tensor, "rows nodes nodes"]

    @property
    def num_nodes(self) -> int:
        """Nodes of the largest tree, root included."""
        return self.tokens.shape[1]


def stack_trees(trees: Sequence[TokenTree]) -> TreeStack:
    """Stack one or more trees. Does not wait for the device."""
    most = max(tree.num_nodes for tree in trees)
    return TreeStack(
        stack_padded([tree.tokens for tree in trees], most),
        stack_padded([tree.parents for tree in trees], most, -1),
        stack_padded([tree.depths for tree in trees], most),
        torch.stack([_ancestors(tree.ancestors, most) for tree in trees]),
    )


def stack_padded(rows: Sequence[Int[Tensor, "_"]], most: int, filler: int = 0) -> Int[Tensor, "rows most"]:
    """Pad each row with `filler` to `most` values and stack the rows."""
    return torch.stack([F.pad(row, (0, most - row.shape[0]), value=filler) for row in rows])


def _ancestors(ancestors: Bool[Tensor, "nodes nodes"], most: int) -> Bool[Tensor, "most most"]:
    nodes = ancestors.shape[0]
    if nodes == most:
        return ancestors
    padded = torch.eye(most, dtype=torch.bool, device=ancestors.device)
    padded[:nodes, :nodes] = ancestors
    return padded
