"""Which nodes of a draft tree are kept."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moray.decoding.engine.node_selection import best_budget, best_path, likely_nodes, subtree
from moray.trees.tree import TokenTree, structure_of

PROBABILITIES, PARENTS = [0.9, 0.8, 0.3, 0.7, 0.2], [-1, 0, 0, 1, 1]
"""A tree .9 (.8 (.7, .2), .3): its mean is .58."""


def test_the_published_choice():
    nodes = likely_nodes(PROBABILITIES, PARENTS)
    assert nodes == [0, 1, 3]
    path, value = best_path(PROBABILITIES, PARENTS, nodes)
    assert path == [0, 1, 3]
    assert value == pytest.approx(1.3236, abs=1e-3)


def test_a_node_below_the_mean_takes_its_subtree_along():
    assert likely_nodes([0.9, 0.1, 0.9], [-1, 0, 1]) == [0]


def test_a_path_may_end_early_and_the_root_stays():
    assert best_path([0.0, 0.5, 0.9], [-1, 0, 0], [0, 1, 2])[0] == [0, 2]
    assert best_path([0.1], [-1], [0]) == ([0], 0.0)
    assert likely_nodes([0.0, 0.9], [-1, 0]) == [0, 1]


def test_a_budget_takes_everything_where_nodes_cost_nothing_and_little_where_they_cost_much():
    everything = best_budget(PROBABILITIES, PARENTS, 2, 20, 1.0, 1.0)
    assert everything == [0, 1, 2, 3, 4], "all layers are read anyway"
    few = best_budget([1.0, 0.4, 0.3, 0.4, 0.1], PARENTS, 1, 40, 0.1, 0.0)
    assert few == [0]
    some = best_budget([1.0, 0.9, 0.01, 0.8, 0.01], PARENTS, 4, 26, 0.5, 1.0)
    assert some == [0, 1, 3]


@given(st.data())
def test_kept_nodes_always_form_a_tree(data):
    count = data.draw(st.integers(1, 24))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, count))]
    probabilities = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    nodes = likely_nodes(probabilities, parents)
    path, _ = best_path(probabilities, parents, nodes)
    budget = best_budget(probabilities, parents, 3, 9, 0.5, 1.0)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    structure = structure_of(parents, depths, torch.device("cpu"))
    tree = TokenTree(torch.arange(count) + 7, structure.parents, structure.depths, structure.ancestors, max(depths))
    for kept in (nodes, path, budget):
        small = subtree(tree, kept)
        assert small.tokens.tolist() == [7 + node for node in kept]
        assert [kept[parent] for parent in small.parents.tolist()[1:]] == [parents[node] for node in kept[1:]]
        assert torch.equal(small.ancestors, structure.ancestors[kept][:, kept])
        assert small.num_levels == tree.num_levels
    assert all(parents[after] == before for before, after in pairwise(path))


def test_nodes_without_a_way_to_the_root_are_a_bug():
    structure = structure_of([-1, 0, 1], [0, 1, 2], torch.device("cpu"))
    tree = TokenTree(torch.arange(3), structure.parents, structure.depths, structure.ancestors, 2)
    for nodes in ([1, 2], [0, 2]):
        with pytest.raises(AssertionError):
            subtree(tree, nodes)
