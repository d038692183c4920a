"""The search finds the best tree there is, and says what it promises."""

import itertools

import pytest

from moray.trees.search import best_paths, expected_tau
from moray.trees.shapes import SparseShape

RATES = [
    [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]],
    [[0.3, 0.35, 0.1], [0.9, 0.05, 0.0]],  # the second candidate is right more often than the first
    [[0.2, 0.2, 0.2], [0.1, 0.1, 0.1]],
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
]


def every_tree(levels: int, ranks: int, num_nodes: int):
    """All sets of nodes that hold every node's parent."""
    nodes = [path for depth in range(1, levels + 1) for path in itertools.product(range(ranks), repeat=depth)]
    for chosen in itertools.combinations(nodes, num_nodes):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            yield chosen


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_no_tree_of_as_many_nodes_is_better(rates, num_nodes):
    paths = best_paths(rates, num_nodes)
    best = max(expected_tau(rates, tree) for tree in every_tree(2, 3, num_nodes))
    assert expected_tau(rates, paths) == pytest.approx(best)


def test_a_tree_that_is_known():
    rates = [[0.6, 0.3], [0.5, 0.25], [0.5]]
    # 0.6, 0.3 and 0.3 (the shorter path first), then 0.15 three times
    assert best_paths(rates, 5) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert expected_tau(rates, best_paths(rates, 5)) == pytest.approx(1 + 0.6 + 0.3 + 0.3 + 0.15 + 0.15)
    assert expected_tau(rates, []) == 1


def test_parents_stand_before_children_and_the_paths_are_a_shape():
    rates = [[0.5, 0.2, 0.15, 0.1], [0.45, 0.2, 0.1, 0.1], [0.4, 0.2, 0.1, 0.1], [1.0, 0.0, 0.0, 0.0]]
    paths = best_paths(rates, 63)
    for place, path in enumerate(paths):
        assert path[:-1] in {(), *paths[:place]}
    assert SparseShape(type="sparse", paths=tuple(paths)).num_nodes == 63


def test_nodes_that_are_never_accepted_are_left_out():
    assert best_paths([[0.5, 0.0], [0.0, 0.2]], 10) == [(0,), (0, 1)]
    assert best_paths([[0.0], [0.9]], 10) == []
