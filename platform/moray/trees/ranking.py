"""What is kept of a dynamic tree's candidates: the likeliest ones, with the root and every parent among them."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.trees.tree import TokenTree


def at_most(
    above: Float[Tensor, "sequences new 1"], log_probs: Float[Tensor, "sequences new children"]
) -> Float[Tensor, "sequences new children"]:
    """Cumulative log-probabilities of children: at most their parent's, -inf for a log-probability that is NaN or > 0.

    Growing a tree relies on that order: NaN or inf would rank above the root, `keep_best` would drop the root, and the
    target would verify below a token that is not the sequence's last.
    """
    scores = above + log_probs
    return torch.where(scores <= above, scores, -math.inf)  # no comparison with NaN holds


def level_of(candidate: int, breadth: int) -> int:
    """Where a candidate of a dynamic tree stands: see the numbering of `trees.growth`."""
    if candidate == 0:
        return 0
    return 1 if candidate <= breadth else 2 + (candidate - 1 - breadth) // breadth**2


def keep_best(
    tokens: Int[Tensor, "sequences candidates"],
    parents: Int[Tensor, "sequences candidates"],
    best: Int[Tensor, "sequences kept"],
    max_depth: int,
) -> list[TokenTree]:
    """The trees of the roots and the likeliest candidates, none of them deeper than `max_depth`.

    A child scores at most its parent's score (see `at_most`) and stands behind it, so a stable sort keeps the root
    first, and every kept node's parent too.
    """
    kept = best.sort(dim=1).values
    size = kept.shape[1]
    rows = torch.arange(size, device=kept.device).expand(kept.shape[0], -1)
    rank = torch.zeros_like(parents).scatter_(1, kept, rows)
    hop = rank.gather(1, parents.gather(1, kept).clamp(min=0))
    new_parents = torch.where(kept == 0, -1, hop)
    ancestors = torch.eye(size, dtype=torch.bool, device=kept.device).repeat(kept.shape[0], 1, 1)
    depths, node = torch.zeros_like(hop), rows
    for _ in range(max_depth):
        depths += (node != 0).long()
        node = hop.gather(1, node)
        ancestors.scatter_(2, node[..., None], True)
    rest = zip(tokens.gather(1, kept), new_parents, depths, ancestors, strict=True)
    return [TokenTree(*own, max_depth) for own in rest]
