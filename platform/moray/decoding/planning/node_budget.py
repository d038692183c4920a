"""How many nodes of drafted trees are worth verifying: those that give most expected tokens per second."""

import math
from collections.abc import Callable, Sequence


def best_node_count(
    log_probs: Sequence[Sequence[float]], num_rows: int, trust: float, seconds_of: Callable[[int], float]
) -> int:
    """The number of nodes to verify in each tree of a pass, at least 1.

    If the drafter is well calibrated, the expected number of accepted nodes is the sum of their probabilities; `trust`
    corrects it. All trees get the same number, because a pass takes as long as if all of its trees were as large as the
    largest.

    Args:
        log_probs: cumulative log-probabilities of the nodes of each tree, best first.
        num_rows: sequences in the pass, with and without drafts.
        trust: ratio of accepted nodes to those that such probabilities promised until now.
        seconds_of: time of a whole cycle by the number of nodes in each tree.
    """
    best, best_rate, total = 1, 0.0, 0.0
    for count in range(1, max(map(len, log_probs)) + 1):
        total += sum(math.exp(own[count - 1]) for own in log_probs if count <= len(own))
        rate = (num_rows + trust * total) / seconds_of(count)
        if rate > best_rate:
            best, best_rate = count, rate
    return best
