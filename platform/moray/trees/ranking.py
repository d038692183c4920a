"""Which of a dynamic tree's candidates are kept: the likeliest ones, always with the root and every parent."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.trees.tree import TokenTree

Numbers = Sequence[int] | Sequence[float]


class Pruned(NamedTuple):
    """A tree of the likeliest nodes, and the sum of their probabilities."""

    tree: TokenTree
    promised: float


def at_most(
    above: Float[Tensor, "sequences new 1"], log_probs: Float[Tensor, "sequences new children"]
) -> Float[Tensor, "sequences new children"]:
    """Cumulative log-probabilities of children: at most their parent's; -inf for a log-probability that is NaN or > 0.

    Growing a tree relies on that order. NaN or inf would rank above the root, `keep_best` would drop the root, and the
    target would verify below a token that is not the last of the sequence.
    """
    scores = above + log_probs
    return torch.where(scores <= above, scores, -math.inf)  # comparisons with NaN are False


def keep_best(
    tokens: Int[Tensor, "sequences candidates"],
    parents: Int[Tensor, "sequences candidates"],
    best: Int[Tensor, "sequences kept"],
    scores: Float[Tensor, "sequences kept"],
    max_depth: int,
) -> list[TokenTree]:
    """Build the trees of the roots and the likeliest candidates, none deeper than `max_depth`.

    A child scores at most as much as its parent (see `at_most`) and comes after it, so a stable sort puts the root
    first and keeps the parent of every kept node.
    """
    kept, order = best.sort(dim=1)
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
    rows = zip(tokens.gather(1, kept), new_parents, depths, ancestors, scores.gather(1, order), strict=True)
    return [
        TokenTree(own, above, below, seen, max_depth, scores=own_scores) for own, above, below, seen, own_scores in rows
    ]


def prune(trees: Sequence[TokenTree], choose: Callable[[list[list[float]]], int]) -> list[Pruned]:
    """Reduce trees to their roots and the likeliest nodes below them. Waits for the device once.

    Args:
        trees: dynamic trees, all with scores.
        choose: choose(log_probs) -> how many nodes to keep in each tree, given for every tree the cumulative
            log-probabilities of its nodes, best first, without nodes of probability 0. It is not called if no node is
            left.
    """
    scored = [(tree, tree.scores) for tree in trees if tree.scores is not None]
    host = torch.cat([torch.stack([scores.double(), t.parents, t.depths]) for t, scores in scored], dim=1).tolist()
    ends = list(accumulate(tree.num_nodes for tree in trees))
    rows = [[values[end - tree.num_nodes : end] for values in host] for tree, end in zip(trees, ends, strict=True)]
    ranked = [
        sorted((node for node in range(1, len(scores)) if scores[node] > -math.inf), key=lambda n: -scores[n])
        for scores, _, _ in rows
    ]
    known = [[scores[node] for node in own] for (scores, _, _), own in zip(rows, ranked, strict=True)]
    most = choose(known) if any(known) else 0
    return [
        Pruned(subtree(tree, sorted([0, *own[:most]]), *rest), math.fsum(map(math.exp, log_probs[:most])))
        for tree, own, (_, *rest), log_probs in zip(trees, ranked, rows, known, strict=True)
    ]


def subtree(tree: TokenTree, kept: list[int], parents: Numbers, depths: Numbers) -> TokenTree:
    """Reduce a tree to some of its nodes.

    Args:
        tree: of any kind.
        kept: in ascending order, with the root and every parent.
        parents: the tree's, on the host.
        depths: the same.

    Raises:
        ValueError: the root or a parent is missing.
    """
    if len(kept) == tree.num_nodes:
        return tree
    if kept[0] != 0:
        raise ValueError(f"the kept nodes {kept} of a draft lack its root")
    place = {node: index for index, node in enumerate(kept)}
    device = tree.tokens.device
    index = torch.tensor(kept, device=device)
    deepest = int(max(depths[node] for node in kept))
    return TokenTree(
        tokens=tree.tokens[index],
        parents=torch.tensor([-1, *(_place(place, kept, int(parents[node])) for node in kept[1:])], device=device),
        depths=tree.depths[index],
        ancestors=tree.ancestors[index][:, index],
        max_depth=deepest,
        draft_probs=None if tree.draft_probs is None else tree.draft_probs[index],
        is_chain=tree.is_chain,
        scores=None if tree.scores is None else tree.scores[index],
        num_empty_levels=tree.num_levels - deepest,
    )


def _place(place: dict[int, int], kept: list[int], parent: int) -> int:
    if parent not in place:
        raise ValueError(f"the kept nodes {kept} of a draft lack the parent {parent}")
    return place[parent]
