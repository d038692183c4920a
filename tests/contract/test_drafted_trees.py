"""Every tree that any drafter proposes is sound, for every shape and every acceptance method."""

import pytest
import torch
from drafting import tree_of
from side_by_side import SHAPES

from moray.decoding.params import SamplingParams
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape, SparseShape

TREE_SHAPES = [
    *SHAPES.values(),
    ChainShape(type="chain", depth=1),
    FixedShape(type="fixed", branching=(1, 1, 1)),
    FixedShape(type="fixed", branching=(2, 3, 2)),
    SparseShape(type="sparse", paths=((0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 2))),
    DynamicShape(type="dynamic", depth=1, breadth=5, nodes=5),
    DynamicShape(type="dynamic", depth=6, breadth=8, nodes=62),
]
ALL_PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=1, acceptance_method="rejection"),
    SamplingParams(temperature=1.0, seed=1, acceptance_method="rejection", top_k=5),
]


@pytest.mark.parametrize("shape", TREE_SHAPES, ids=lambda shape: shape.name)
def test_every_drafted_tree_is_sound(drafter, batch, shape, variant):
    batch.tokens[0, 9:18] = batch.tokens[0, :9].clone()  # something for prompt lookup to find
    for params in ALL_PARAMS:
        tree = tree_of(drafter, batch.tokens, batch.taps, shape, params)
        parents, depths, tokens = tree.parents.tolist(), tree.depths.tolist(), tree.tokens.tolist()
        whole = not variant.startswith("ngram")  # which ends where nothing matches
        assert tree.num_nodes == shape.num_nodes + 1 if whole else 1 <= tree.num_nodes <= shape.num_nodes + 1
        assert (parents[0], depths[0], tokens[0]) == (-1, 0, int(batch.tokens[0, 10]))
        assert shape.depth >= tree.max_depth >= max(depths)
        assert tree.max_depth == shape.depth or not whole
        ancestors = torch.eye(tree.num_nodes, dtype=torch.bool)
        for node in range(1, tree.num_nodes):
            assert 0 <= parents[node] < node, "a parent stands before its children"
            assert depths[node] == depths[parents[node]] + 1
            ancestors[node] |= ancestors[parents[node]]
        assert torch.equal(tree.ancestors, ancestors)
        assert len(set(zip(parents, tokens, strict=True))) == tree.num_nodes, "siblings differ"
        assert all(0 <= token < drafter.spec.vocab_size for token in tokens)
        sampled = (
            params.acceptance_method == "rejection"
            and isinstance(shape, ChainShape)
            and not params.is_greedy
            and depths[1:]
        )
        assert (tree.draft_probs is not None) == bool(sampled)
        if tree.draft_probs is not None:
            torch.testing.assert_close(tree.draft_probs.sum(dim=-1), torch.ones(tree.num_nodes))
            assert all(float(tree.draft_probs[node, tokens[node]]) > 0 for node in range(1, tree.num_nodes))
