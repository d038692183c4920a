"""A drafter need not observe while nothing is drafted: what it drafts after a pause is what it would have drafted
without one."""

import pytest
from tiny_drafters import VARIANTS, build

from moray.decoding.engine.observer import MAX_TOKENS
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.planning.controller import DraftPlan
from moray.trees.shapes import ChainShape, DynamicShape

CHAIN = ChainShape(type="chain", depth=3)
TREE = DynamicShape(type="dynamic", depth=3, breadth=3, nodes=8)
CAPACITY = 400


def drafts_by_position(target, drafter, num_tokens, drafts_at, shape=CHAIN):
    """The tokens of every draft by its root's position; `drafts_at(cycle)` says which cycles draft."""
    decoder = SpeculativeDecoder(target.target, drafter, shape, CAPACITY)
    engine = decoder._engine
    (scheduler,) = engine.draft_schedulers.values()
    source, observe = scheduler.source, drafter.observe
    submit, collect = source.submit, source.collect
    found, observed, positions = {}, [], {}

    def submitting(jobs):
        positions.update({each.number: each.position for each in jobs})
        submit(jobs)

    def collecting(numbers):
        trees = collect(numbers)
        found.update({positions[number]: tree.tokens.tolist() for number, tree in trees.items()})
        return trees

    def observing(taps):
        observed.append(taps)
        return observe(taps)

    source.submit, source.collect = submitting, collecting
    # The pass that is being prepared is the cycle that drafts are for.
    scheduler.controller.plan = lambda *_: (
        DraftPlan(shape, drafter.layer_counts[0]) if drafts_at(engine.stats.num_passes) else None
    )
    drafter.observe = observing
    try:
        generation = decoder.generate(target.prompt(), SamplingParams(), num_tokens, ())
    finally:
        del drafter.observe
    return found, len(observed), generation


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=lambda shape: shape.type)
def test_drafts_after_a_pause_are_those_without_one(tiny, variant, shape):
    target = tiny("llama")
    drafter = build(target, VARIANTS[variant], 3)
    always, _, generation = drafts_by_position(target, drafter, 40, lambda _: True, shape)
    paused, num_observed, other = drafts_by_position(target, drafter, 40, lambda cycle: cycle % 7 in (0, 1), shape)
    assert other.tokens == generation.tokens
    num_drafts = sum(cycle % 7 in (0, 1) for cycle in range(other.num_cycles))
    assert num_observed <= 1 + num_drafts, "it observed while nothing was drafted"
    common = always.keys() & paused.keys()
    assert len(common) >= 3
    for position in common:
        assert paused[position] == always[position], position


def test_a_long_pause_is_caught_up_with_in_chunks(tiny):
    target = tiny("llama")
    drafter = build(target, VARIANTS["eagle-0"])
    length = MAX_TOKENS + 40
    paused, num_observed, _ = drafts_by_position(target, drafter, length, lambda cycle: cycle == length - 5)
    assert num_observed == 2, "the prompt too, for nothing was drafted before"
    always, *_ = drafts_by_position(target, drafter, length, lambda _: True)
    ((position, tokens),) = paused.items()
    assert always[position] == tokens
