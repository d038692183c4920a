"""The best sparse tree for given hit rates (Medusa, arXiv 2401.10774, section 2.3.3).

    rates[d][k] = P(the target's next token is the candidate of rank k at level d), levels assumed independent

             root              a node is accepted with the product of the rates on its path:
           /      \\
        [0]        [1]         [1, 0]: rates[0][1] * rates[1][0]
       /   \\         |
    [0, 0] [0, 1]  [1, 0]      tau = 1 + the sum over all nodes

No child's product exceeds its parent's, so the n nodes with the largest products form a tree, and no tree of n nodes
has a larger tau. Torch-free; this module does not know where the rates come from.
"""

import heapq
import math
from collections.abc import Sequence

Rates = Sequence[Sequence[float]]
"""By level below the root, then by rank; each from 0 to 1."""

Path = tuple[int, ...]
"""A node, given by the ranks on its path from the root."""


def best_paths(rates: Rates, num_nodes: int) -> list[Path]:
    """The nodes with the largest products, largest first, parents always before their children.

    Returns fewer than `num_nodes` if no other node can be accepted. Among equal products, the shorter path comes first,
    then the one with lower ranks.
    """
    waiting: list[tuple[float, int, Path]] = []

    def expand(path: Path, product: float) -> None:
        for rank, rate in enumerate(rates[len(path)] if len(path) < len(rates) else ()):
            if product * rate > 0:
                heapq.heappush(waiting, (-product * rate, len(path) + 1, (*path, rank)))

    expand((), 1.0)
    best: list[Path] = []
    while waiting and len(best) < num_nodes:
        negative, _, path = heapq.heappop(waiting)
        best.append(path)
        expand(path, -negative)
    return best


def expected_tau(rates: Rates, paths: Sequence[Path]) -> float:
    """Expected tokens per target pass for a tree, given the rates."""
    return 1.0 + sum(math.prod(rates[level][rank] for level, rank in enumerate(path)) for path in paths)
