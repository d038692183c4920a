"""Which nodes of a tree are worth verifying to the end, given how likely each is to be accepted (SpaDec). Torch-free.

    trie      the nodes at or above the tree's mean, without those below a dropped one
    path      the path through `trie`'s nodes that maximises V(n) = p(n) g(depth) + max V(child), as published
    budget    as many of the likeliest nodes as give the most expected tokens per layer read

Nodes are numbered as in `TokenTree`: the root is 0, and parents come before their children. All choices keep the root,
and no node without its parent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def likely_nodes(probabilities: Sequence[float], parents: Sequence[int]) -> list[int]:
    """The nodes at or above the mean whose parents are kept too.

    The mean is over drafted nodes: the root is verified in any case, and a predictor does not learn from roots.
    """
    drafted = probabilities[1:]
    enough = min(sum(drafted) / max(1, len(drafted)), max(drafted, default=0.0))  # a mean is rounded
    kept = {0}
    for node in range(1, len(parents)):
        if parents[node] in kept and probabilities[node] >= enough:
            kept.add(node)
    return sorted(kept)


def depth_weight(depth: int) -> float:
    """g(depth): how much a node at this depth is worth; published."""
    return math.log(depth + 1) if depth < 3 else 1.0 / math.cosh(depth - 3)


def best_path(
    probabilities: Sequence[float], parents: Sequence[int], depths: Sequence[int], nodes: Sequence[int]
) -> tuple[list[int], float]:
    """The path from the root to a leaf through some of the nodes that is worth most, and its V(root)."""
    value = {node: probabilities[node] * depth_weight(depths[node]) for node in nodes}
    best_child: dict[int, int] = {}
    for node in reversed(nodes):  # children come after their parents
        if node in best_child:
            value[node] += value[best_child[node]]
        above = parents[node]
        if node and (above not in best_child or value[node] >= value[best_child[above]]):
            best_child[above] = node
    path = [0]
    while path[-1] in best_child:
        path.append(best_child[path[-1]])
    return path, value[0]


@dataclass(frozen=True)
class PassCost:
    """What a pass over some nodes reads, in layers."""

    always: float
    """Layers that any pass reads, and the vocabulary projection in units of a layer."""
    routed: int
    """Layers with a router from the point on where nodes are chosen."""
    share: float
    """Share of the nodes that run through one of these."""

    def of(self, num_nodes: int) -> float:
        """Expected layers; nodes are taken to choose their layers independently."""
        return self.always + self.routed * (1.0 - (1.0 - self.share) ** num_nodes)


def best_budget(probabilities: Sequence[float], parents: Sequence[int], cost: PassCost) -> list[int]:
    """The likeliest nodes, as many as give the most expected tokens per layer read. A child counts for at most its
    parent's probability."""
    reach = [1.0]
    for node in range(1, len(parents)):
        reach.append(min(probabilities[node], reach[parents[node]]))
    order = sorted(range(len(reach)), key=lambda node: -reach[node])  # stable: parents stay before their children
    expected = accumulate(reach[node] for node in order)
    rates = [tokens / cost.of(count) for count, tokens in enumerate(expected, start=1)]
    return sorted(order[: 1 + rates.index(max(rates))])
