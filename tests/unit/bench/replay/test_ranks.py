"""Cycles by hand from the ranks of a text's tokens."""

import pytest

from moray.bench.replay.ranks import NOT_A_CANDIDATE, TokenRanks, num_accepted
from moray.decoding.stats import tau
from moray.trees.shapes import ChainShape, FixedShape, SparseShape

RANKS = [0, 0, 3, 0, 0, 0, 1]
"""Of a drafter that reads nothing but text: a token's rank is the same below every root before it."""
TEXT = TokenRanks("a", [RANKS[root : root + 3] for root in range(len(RANKS))])
TREE = SparseShape(type="sparse", paths=((0,), (1,), (0, 0)))


@pytest.mark.parametrize(
    ("shape", "accepted", "emitted"),
    [
        (ChainShape(type="chain", depth=2), [2, 2, 0], [3, 3, 1]),
        (ChainShape(type="chain", depth=1), [1, 0, 1, 1], [2, 1, 2, 2]),
        (TREE, [2, 2, 1], [3, 3, 1]),
        (FixedShape(type="fixed", branching=(4, 1)), [2, 2, 1], [3, 3, 1]),
        (FixedShape(type="fixed", branching=(1, 1, 4)), [3, 3], [4, 3]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_cycles_of_every_static_tree_follow_from_the_ranks(shape, accepted, emitted):
    made = TEXT.generation(shape)
    assert (made.accepted, made.emitted) == (accepted, emitted)
    assert made.nodes == [shape.num_nodes] * len(emitted)
    assert tau([made]) == 7 / len(emitted)


def test_chains_of_every_depth_are_those_of_the_ranks():
    matches = TEXT.matches(3)
    assert matches.matched == [2, 1, 0, 3, 2, 1, 0]
    for depth in (1, 2, 3):
        by_ranks = TEXT.generation(ChainShape(type="chain", depth=depth))
        assert [cycle[1:] for cycle in matches.cycles(depth)] == list(
            zip(by_ranks.accepted, by_ranks.emitted, strict=True)
        )


def test_a_token_that_is_no_candidate_is_in_no_tree():
    everywhere = FixedShape(type="fixed", branching=(16, 16))
    assert num_accepted(everywhere, [NOT_A_CANDIDATE, 0]) == 0
    assert num_accepted(everywhere, [15, 16]) == 1
    assert num_accepted(everywhere, []) == 0
    assert num_accepted(TREE, [1, 0]) == 1, "[1, 0] is no node of this tree"
