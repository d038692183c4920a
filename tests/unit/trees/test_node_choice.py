"""Which nodes of a draft tree are kept."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moray.trees.node_choice import PassCost, best_budget, best_path, likely_nodes
from moray.trees.ranking import subtree
from moray.trees.tree import TokenTree, structure_of

PROBABILITIES, PARENTS, DEPTHS = [0.9, 0.8, 0.3, 0.7, 0.2], [-1, 0, 0, 1, 1], [0, 1, 1, 2, 2]
"""A tree .9 (.8 (.7, .2), .3)."""


def test_the_published_choice():
    nodes = likely_nodes(PROBABILITIES, PARENTS)
    assert nodes == [0, 1, 3]
    path, value = best_path(PROBABILITIES, PARENTS, DEPTHS, nodes)
    assert path == [0, 1, 3]
    assert value == pytest.approx(1.3236, abs=1e-3)


def test_a_node_below_the_mean_takes_its_subtree_along():
    assert likely_nodes([0.9, 0.1, 0.9, 0.8], [-1, 0, 1, 0]) == [0, 3]


def test_a_node_alone_is_kept_and_so_are_nodes_that_are_all_alike():
    assert likely_nodes([0.9, 0.1], [-1, 0]) == [0, 1]
    assert likely_nodes([0.9, 0.1, 0.1, 0.1], [-1, 0, 1, 2]) == [0, 1, 2, 3]


def test_a_path_weighs_depth():
    """The deep path's third node is worth g(3) = 1, more than the likelier one beside it."""
    assert best_path([0.0, 0.5, 0.9], [-1, 0, 0], [0, 1, 1], [0, 1, 2])[0] == [0, 2]
    assert best_path([0.0, 0.9, 0.5, 0.5], [-1, 0, 0, 2], [0, 1, 1, 2], [0, 1, 2, 3])[0] == [0, 2, 3]
    assert best_path([0.1], [-1], [0], [0]) == ([0], 0.0)


def test_a_budget_takes_everything_where_nodes_cost_nothing_and_little_where_they_cost_much():
    everything = best_budget(PROBABILITIES, PARENTS, PassCost(3.0, 20, 1.0))
    assert everything == [0, 1, 2, 3, 4], "all layers are read anyway"
    few = best_budget([1.0, 0.4, 0.3, 0.4, 0.1], PARENTS, PassCost(1.0, 40, 0.1))
    assert few == [0]
    some = best_budget([1.0, 0.9, 0.01, 0.8, 0.01], PARENTS, PassCost(5.0, 26, 0.5))
    assert some == [0, 1, 3]
    assert best_budget(PROBABILITIES, PARENTS, PassCost(1.0, 10, 0.0)) == [0, 1, 2, 3, 4], "no layer is read"


@given(st.data())
def test_kept_nodes_always_form_a_tree(data):
    count = data.draw(st.integers(1, 24))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, count))]
    probabilities = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    nodes = likely_nodes(probabilities, parents)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    path, _ = best_path(probabilities, parents, depths, nodes)
    budget = best_budget(probabilities, parents, PassCost(3.0, 9, data.draw(st.floats(0, 1))))
    structure = structure_of(parents, depths, torch.device("cpu"))
    tree = TokenTree(torch.arange(count) + 7, structure.parents, structure.depths, structure.ancestors, max(depths))
    for kept in (nodes, path, budget):
        small = subtree(tree, kept, parents, depths)
        assert small.tokens.tolist() == [7 + node for node in kept]
        assert [kept[parent] for parent in small.parents.tolist()[1:]] == [parents[node] for node in kept[1:]]
        assert torch.equal(small.ancestors, structure.ancestors[kept][:, kept])
        assert small.num_levels == tree.num_levels
    assert all(parents[after] == before for before, after in pairwise(path))


def test_nodes_without_a_way_to_the_root_are_refused():
    parents, depths = [-1, 0, 1], [0, 1, 2]
    structure = structure_of(parents, depths, torch.device("cpu"))
    tree = TokenTree(torch.arange(3), structure.parents, structure.depths, structure.ancestors, 2)
    for nodes, lacks in (([1, 2], "lack its root"), ([0, 2], "lack the parent 1")):
        with pytest.raises(ValueError, match=lacks):
            subtree(tree, nodes, parents, depths)
