"""Cycles by hand from the ranks of a text's tokens."""

import pytest
import torch

from moray.bench.replay.ranks import CHAIN, NOT_A_CANDIDATE, TokenRanks, num_children, picks_at
from moray.decoding.generation import tau
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.trees.shapes import ChainShape, FixedShape, SparseShape

RANKS = [0, 0, 3, 0, 0, 0, 1]
"""Of a drafter that reads nothing but text: a token's rank is the same below every root before it."""


def ranks_of(ranks: list[list[int]]) -> TokenRanks:
    """The same ranks for every number of children, as far as there are so many candidates."""
    counts = {count: max(1, count) for count in (CHAIN, 1, 2, 3, 4, 16)}
    kept = {
        count: [[rank if rank < most else NOT_A_CANDIDATE for rank in below] for below in ranks]
        for count, most in counts.items()
    }
    return TokenRanks("a", kept)


TEXT = ranks_of([RANKS[root : root + 3] for root in range(len(RANKS))])
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
    text = ranks_of([[NOT_A_CANDIDATE, 0], [15, 16], [], [1, 0]])
    assert text.num_accepted(everywhere) == [0, 1, 0, 2]
    assert text.num_accepted(TREE)[3] == 1, "[1, 0] is no node of this tree"


def test_equal_scores_are_ordered_as_live_decoding_orders_them():
    """Scores of packed drafters are rounded, so several tokens often have the same."""
    logits = torch.randint(3, (1, 500), generator=torch.Generator().manual_seed(0)).float()
    sampler = Sampler(SamplingParams(), 500, torch.device("cpu"))
    counts = [CHAIN, 1, 2, 7]
    found = [pick(logits, 0) for pick in picks_at(sampler, 9, 1, counts)]
    shapes = [ChainShape(type="chain", depth=1), *(FixedShape(type="fixed", branching=(count,)) for count in (1, 2, 7))]
    assert [num_children(shape) for shape in shapes] == [(count,) for count in counts]
    for candidates, shape in zip(found, shapes, strict=True):
        live = picks_of([sampler], [9], shape)([0], logits[None], 0, max(1, shape.max_children)).tokens[0]
        assert torch.equal(candidates, live), shape.name
