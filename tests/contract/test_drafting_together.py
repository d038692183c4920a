"""Drafts of many sequences made together are those that each sequence gets alone, for every drafter and every shape."""

import pytest
import torch
from drafting import pieces_of
from one_tree import propose
from side_by_side import SHAPES
from tiny_batches import batch_of
from tiny_drafters import SEVERAL_LAYER_COUNTS, VARIANTS, build

from moray.decoding.params import SamplingParams
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.trees.shapes import ChainShape, SparseShape

ALL_SHAPES = {
    **SHAPES,
    "sparse": SparseShape(type="sparse", paths=((0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 2))),
}
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=5, top_k=9),
    SamplingParams(temperature=1.0, seed=2, acceptance_method="rejection"),
    SamplingParams(),
]
PROMPTS = (9, 4, 14, 6, 11, 3)
"""Tokens that each sequence has read before its first draft."""
ACCEPTED = ((0, 2, 1, 3, 0, 2), (1, 0, 3, 0, 2, 1))
"""Of each draft, levels of the true text that were accepted."""


class Sequence:
    """One sequence's state, and what it goes on with: the true text, whatever was drafted."""

    def __init__(self, drafter, batch, number: int, params: SamplingParams = PARAMS[0]) -> None:
        self.drafter, self.batch = drafter, batch
        self.sampler = Sampler(params, drafter.spec.vocab_size, torch.device("cpu"), number)
        self.state, self.known = drafter.new_state(64, 64), 0

    @property
    def root(self) -> torch.Tensor:
        return self.batch.tokens[0, self.known : self.known + 1]

    def read(self, count: int, num_kept: int = 0) -> None:
        end = self.known + count
        memory = self.drafter.observe(pieces_of(self.batch.taps, self.known, end))
        self.drafter.extend(self.state, self.batch.tokens[0, self.known : end], memory, num_kept)
        self.known = end

    def draft(self, shape):
        select = self.sampler.selector(self.known, shape.depth, isinstance(shape, ChainShape))
        return propose(self.drafter, self.state, self.root, shape, select)


def begun(drafter, batch) -> list[Sequence]:
    sequences = [Sequence(drafter, batch, number, params) for number, params in enumerate(PARAMS)]
    for sequence, length in zip(sequences, PROMPTS, strict=True):
        sequence.read(length)
    return sequences


def draft_together(sequences: list[Sequence], shape) -> list:
    picks = picks_of([s.sampler for s in sequences], [s.known for s in sequences], shape)
    roots = torch.cat([sequence.root for sequence in sequences])
    return sequences[0].drafter.propose_many([sequence.state for sequence in sequences], roots, shape, picks)


def assert_same(tree, other) -> None:
    assert tree.tokens.tolist() == other.tokens.tolist()
    assert tree.parents.tolist() == other.parents.tolist()
    assert tree.depths.tolist() == other.depths.tolist()
    assert torch.equal(tree.ancestors, other.ancestors)
    assert (tree.max_depth, tree.is_chain, tree.num_levels) == (other.max_depth, other.is_chain, other.num_levels)
    assert (tree.draft_probs is None) == (other.draft_probs is None)
    if tree.draft_probs is not None:
        torch.testing.assert_close(tree.draft_probs, other.draft_probs, atol=1e-5, rtol=1e-4)


@pytest.fixture(params=ALL_SHAPES)
def any_shape(request):
    return ALL_SHAPES[request.param]


@pytest.fixture
def repeating(batch, variant):
    if variant.startswith("ngram"):  # something to find, for the longer ones
        batch.tokens[0, :24] = batch.tokens[0, :5].repeat(5)[:24]
    return batch


@pytest.fixture
def drafter(drafter, variant):
    if variant.startswith("medusa"):  # its heads begin alike: paths of the same tokens in another order would tie
        with torch.no_grad():
            for weight in drafter.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return drafter


def test_drafts_made_together_are_those_made_alone(drafter, repeating, any_shape, variant):
    """States of many lengths, with paths of many lengths accepted, greedy and sampled, in turn together and alone."""
    together, alone = begun(drafter, repeating), begun(drafter, repeating)
    depths: set[int] = set()
    with torch.no_grad():
        for cycle, accepted in enumerate((*ACCEPTED, ACCEPTED[0])):
            if cycle == 2:  # drafts made alone in between leave nothing behind
                for sequence in together[::2]:
                    sequence.draft(any_shape)
            trees = draft_together(together, any_shape)
            for tree, sequence, other, count in zip(trees, together, alone, accepted, strict=True):
                wanted = other.draft(any_shape)
                assert_same(tree, wanted)
                depths.add(tree.max_depth)
                for each in (sequence, other):
                    each.read(1 + count, min(wanted.num_kept(count), 1 + count))
    if variant.startswith("ngram"):
        assert len(depths) > 1, "none gave up before the others"
    else:
        assert depths == {any_shape.depth}


def test_one_sequence_is_many_too(drafter, repeating, any_shape):
    sequence, other = Sequence(drafter, repeating, 0), Sequence(drafter, repeating, 0)
    for each in (sequence, other):
        each.read(12)
    with torch.no_grad():
        (tree,) = draft_together([sequence], any_shape)
        assert_same(tree, other.draft(any_shape))


@pytest.mark.parametrize("name", SEVERAL_LAYER_COUNTS)
def test_each_sequence_has_its_own_n(tiny, name):
    target = tiny("llama")
    drafter = build(target, VARIANTS[name])
    batch = batch_of(target.target, [target.prompt(0, 24)], 6, drafter.needs)
    together, alone = begun(drafter, batch), begun(drafter, batch)
    for sequences in (together, alone):
        for number, sequence in enumerate(sequences):
            drafter.set_num_target_layers(sequence.state, drafter.layer_counts[number % len(drafter.layer_counts)])
    with torch.no_grad():
        for shape in ALL_SHAPES.values():
            for tree, other in zip(draft_together(together, shape), alone, strict=True):
                assert_same(tree, other.draft(shape))
