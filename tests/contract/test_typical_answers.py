"""Typical acceptance, which is lossy: answers with every drafter on every tree, and its two extremes."""

import pytest
from rehearsed import Rehearsed
from side_by_side import COUPLED, SHAPES, plainly
from spelling import length_until, spell
from tiny_drafters import VARIANTS, build
from tiny_targets import MAX_POSITIONS

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.stop import StopStrings

DYNAMIC = SHAPES["dynamic"]


TYPICAL = SamplingParams(temperature=0.8, seed=7, acceptance_method="typical")


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("variant", [*VARIANTS, "rehearsed"])
def test_typical_acceptance_runs_on_every_tree(tiny, variant, shape):
    target = tiny("llama")
    drafter = Rehearsed(target.target, 0.5) if variant == "rehearsed" else build(target, VARIANTS[variant])
    decoder = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
    first = decoder.generate(target.prompt(), TYPICAL, 20, ())
    again = decoder.generate(target.prompt(), TYPICAL, 20, ())
    assert len(first.tokens) == 20
    assert (again.tokens, again.accepted) == (first.tokens, first.accepted), "a function of the seed"
    stop = StopStrings([spell(first.tokens[7:9])], spell)
    ended = decoder.generate(target.prompt(), TYPICAL, 20, (), stop=stop)
    assert ended.tokens == first.tokens[: length_until(stop.strings[0], first.tokens)]


def test_typical_acceptance_takes_all_or_nothing_at_its_extremes(tiny, shape):
    target = tiny("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), shape, MAX_POSITIONS)
    nothing = TYPICAL.model_copy(update={"typical_epsilon": 1.0, "typical_delta": 1e9})
    sampled = decoder.generate(target.prompt(), nothing, 20, ())
    assert sampled.tokens == plainly(target, target.prompt(), COUPLED, 20)
    assert not any(sampled.accepted)
    everything = TYPICAL.model_copy(update={"typical_epsilon": 0.0})
    drafted = decoder.generate(target.prompt(), everything, 20, ())
    deepest = shape.depth if shape is not DYNAMIC else 3  # whose nodes need not reach its last level
    assert min(drafted.accepted) >= deepest
    assert drafted.tokens != sampled.tokens
