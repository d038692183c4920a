"""Plain and speculative decoding of the same prompt, to be compared token by token."""

import random

from tiny_targets import MAX_POSITIONS, TinyTarget

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.generation import Generation
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.planning.costs import CostTable
from moray.drafters.base import Drafter
from moray.trees.shapes import AdaptiveShape, AnyShape, ChainShape, DynamicShape, FixedShape

GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.8, seed=7)
FILTERED = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=3)
SHAPES = {
    "chain": ChainShape(type="chain", depth=4),
    "fixed": FixedShape(type="fixed", branching=(3, 2, 1)),
    "dynamic": DynamicShape(type="dynamic", depth=4, breadth=3, nodes=14),
}
ADAPTIVE = {
    "adaptive chain": AdaptiveShape(type="adaptive", depth=4),
    "adaptive tree": AdaptiveShape(type="adaptive", depth=4, breadth=3, nodes=14),
}


class MoodyCosts(CostTable):
    """Costs that change at every look, whatever was accepted: so that depths and sizes do, down to no draft."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__({})
        object.__setattr__(self, "_random", random.Random(seed))

    def verify_seconds(self, num_rows: int, num_tokens: int) -> float:
        seconds = 10 ** self._random.uniform(-1, 1)  # type: ignore[attr-defined]
        return seconds / 6 if num_tokens == 1 else seconds

    def draft_seconds(self, num_rows: int, num_levels: int, num_target_layers: int) -> float:
        return 0.0


def plainly(tiny: TinyTarget, prompt: list[int], params: SamplingParams, count: int, eos: tuple[int, ...] = ()) -> list:
    """What the target alone generates; remembered."""
    key = (tuple(prompt), params, count, eos)
    if key not in tiny.known:
        tiny.known[key] = PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, params, count, eos).tokens
    return tiny.known[key]


def speculate(
    tiny: TinyTarget,
    drafter: Drafter,
    shape: AnyShape,
    prompt: list[int],
    params: SamplingParams,
    count: int,
    eos: tuple[int, ...] = (),
) -> Generation:
    """One generation by a new decoder with a long context."""
    return SpeculativeDecoder(tiny.target, drafter, shape, MAX_POSITIONS).generate(prompt, params, count, eos)


def is_lossless(
    tiny: TinyTarget,
    drafter: Drafter,
    shape: AnyShape,
    params: SamplingParams,
    prompts: list[list[int]],
    count: int = 40,
) -> bool:
    """Whether one decoder gives the target's own tokens for every prompt in turn."""
    decoder = SpeculativeDecoder(tiny.target, drafter, shape, MAX_POSITIONS)
    return all(
        decoder.generate(prompt, params, count, ()).tokens == plainly(tiny, prompt, params, count) for prompt in prompts
    )
