"""Speculation gives the target's own text: every family, every drafter, every tree, greedy and sampled.

In fp32 the comparison is exact. Two drafters stand in for all degrees of acceptance: those of the union, overfitted
on one answer, and the target itself as a drafter, exact or with noise.
"""

from contextlib import nullcontext

import pytest
from rehearsed import Rehearsed
from shape_checks import unchecked
from side_by_side import COUPLED, FILTERED, GREEDY, SHAPES, is_lossless, plainly, speculate
from tiny_drafters import VARIANTS, build
from tiny_targets import MAX_POSITIONS, TARGETS

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.trees.shapes import SparseShape

FIRST_TARGET = next(iter(TARGETS))
CHAIN, FIXED = SHAPES["chain"], SHAPES["fixed"]


@pytest.fixture(autouse=True)
def _checked_once(request):
    """Tensors' shapes are checked where a drafter meets the first target with a chain: elsewhere they are the same."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with nullcontext() if params.get("target_name") == FIRST_TARGET and params.get("shape") == CHAIN else unchecked():
        yield


def every_target_variant_and_shape(turn: int) -> pytest.MarkDecorator:
    """All of them. On the first target, every drafter meets every tree, and then one tree on one other target, which
    differ from drafter to drafter and `turn` to `turn`; the rest is soak."""
    cases = []
    for i, target_name in enumerate(TARGETS):
        for j, variant in enumerate(VARIANTS):
            for k, (name, shape) in enumerate(SHAPES.items()):
                is_turn = i == 1 + (j + turn) % (len(TARGETS) - 1) and k == (i + j + turn) % len(SHAPES)
                marks = [] if i == 0 or is_turn else [pytest.mark.soak]
                cases.append(
                    pytest.param(target_name, variant, shape, marks=marks, id=f"{target_name}-{variant}-{name}")
                )
    return pytest.mark.parametrize(("target_name", "variant", "shape"), cases)


def test_plain_decoding_is_what_transformers_generates(tiny, greedy, target_name):
    target = tiny(target_name)
    for seed, length in ((0, 9), (1, 1), (2, 30)):
        assert plainly(target, target.prompt(seed, length), GREEDY, 40) == greedy(target_name, seed, length)
    assert len(set(greedy(target_name))) > 10, "a text that repeats one token proves nothing"


@every_target_variant_and_shape(turn=0)
def test_greedy_equals_transformers(tiny, greedy, learnt, target_name, variant, shape):
    target, drafter = tiny(target_name), learnt(target_name, variant)
    decoder = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
    known = decoder.generate(target.prompt(), GREEDY, 40, ())
    assert known.tokens == greedy(target_name)
    if not variant.startswith("ngram"):  # a text without repetition
        assert max(known.accepted) >= 2, "no long path was accepted: the drafter has not learnt its text"
    if not variant.startswith("independent"):  # which may know the text perfectly
        assert min(known.accepted) < shape.depth, "nothing was refused"
    assert decoder.generate(target.prompt(1, 1), GREEDY, 10, ()).tokens == greedy(target_name, 1, 1)[:10]


@every_target_variant_and_shape(turn=1)
def test_coupled_sampling_equals_plain_sampling(tiny, learnt, target_name, variant, shape):
    target, drafter = tiny(target_name), learnt(target_name, variant)
    assert is_lossless(target, drafter, shape, COUPLED, [target.prompt()], 20)


def test_untrained_drafters_cost_nothing_but_time(tiny, variant, shape):
    target = tiny("llama")
    drafter = build(target, VARIANTS[variant], seed=5)
    assert is_lossless(target, drafter, shape, GREEDY, [target.prompt(3)], 15)
    assert is_lossless(target, drafter, shape, FILTERED, [target.prompt(3)], 15)


def test_sparse_trees_give_the_same_text(tiny, learnt, variant):
    target, drafter = tiny("llama"), learnt("llama", variant)
    shape = SparseShape(type="sparse", paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
    assert is_lossless(target, drafter, shape, GREEDY, [target.prompt(), target.prompt(1, 5)], 25)
    assert is_lossless(target, drafter, shape, COUPLED, [target.prompt()], 15)


@pytest.mark.parametrize("params", [GREEDY, COUPLED, FILTERED], ids=["greedy", "coupled", "filtered"])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_every_degree_of_acceptance_gives_the_same_text(tiny, shape, params, noise):
    target = tiny("qwen2")
    drafter = Rehearsed(target.target, noise)
    assert is_lossless(target, drafter, shape, params, [target.prompt(), target.prompt(4, 20)])


def test_sampled_text_depends_on_the_seed(tiny):
    target = tiny("llama")
    texts = [plainly(target, target.prompt(), SamplingParams(temperature=0.8, seed=seed), 20) for seed in range(4)]
    assert len(set(map(tuple, texts))) == 4


@pytest.mark.parametrize(
    "params",
    [GREEDY, COUPLED, FILTERED, SamplingParams(temperature=0.8, top_p=0.9, acceptance_method="rejection")],
    ids=["greedy", "coupled", "filtered", "rejection"],
)
def test_the_target_accepts_all_of_its_own_chain(tiny, target_name, params):
    target = tiny(target_name)
    generation = speculate(target, Rehearsed(target.target), CHAIN, target.prompt(), params, 31)
    assert generation.accepted == [CHAIN.depth] * 6
    assert generation.emitted == [CHAIN.depth + 1] * 6


def test_the_target_accepts_all_levels_of_its_own_fixed_tree(tiny, target_name):
    target = tiny(target_name)
    for params in (GREEDY, COUPLED):
        generation = speculate(target, Rehearsed(target.target), FIXED, target.prompt(), params, 29)
        assert generation.accepted == [FIXED.depth] * 7
