"""Typical acceptance has another law, by intent, and exactly the one it says."""

import math

import pytest
import torch
from laws import (
    COUPLING,
    CPU,
    SHORT_CHAIN,
    SHORT_DYNAMIC,
    SIBLINGS,
    TableWorld,
    counts_of,
    fits,
    keeps_the_law,
    reference_probs,
)

from moray.decoding.params import SamplingParams
from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.accept import Accepted, accept_typical
from moray.decoding.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


TYPICAL = SamplingParams(temperature=1.0, acceptance_method="typical")
NOTHING = SamplingParams(temperature=1.0, acceptance_method="typical", typical_epsilon=1.0, typical_delta=1e9)


def typical_law(world: TableWorld, params: SamplingParams, depth: int, count: int) -> torch.Tensor:
    """Exact law of `count` tokens by chains of `depth`: the accepted drafts are certain, what follows is drawn."""
    probs = reference_probs(world.target, params)
    best = world.drafter.argmax(dim=-1).tolist()
    law = torch.zeros(world.vocabulary**count, dtype=torch.float64)

    def spread(text: list[int], mass: float) -> None:
        last = text[-1] if text else 0
        text = list(text)
        for _ in range(depth):
            p = probs[last]
            bound = min(params.typical_epsilon, params.typical_delta * math.exp(-float(torch.special.entr(p).sum())))
            if not p[best[last]] > bound:
                break
            last = best[last]
            text.append(last)
        for token in range(world.vocabulary):
            longer = [*text, token]
            if len(longer) < count:
                spread(longer, mass * float(probs[last, token]))
            else:
                index = 0
                for digit in longer[:count]:
                    index = index * world.vocabulary + digit
                law[index] += mass * float(probs[last, token])

    spread([], 1.0)
    return law


@pytest.mark.parametrize("shape", [SHORT_CHAIN, SIBLINGS, SHORT_DYNAMIC], ids=["chain", "fixed", "dynamic"])
def test_typical_acceptance_does_not_keep_the_law(shape):
    assert not keeps_the_law(shape, TYPICAL, samples=600)


@pytest.mark.parametrize("shape", [SHORT_CHAIN, SIBLINGS, SHORT_DYNAMIC], ids=["chain", "fixed", "dynamic"])
def test_typical_acceptance_that_accepts_nothing_is_plain_sampling(shape):
    """Text by text that of coupled sampling, and so the target's law."""
    world = TableWorld()
    for seed in range(40):
        update = {"seed": seed}
        plain = world.generate(shape, COUPLING.model_copy(update=update), 6)
        assert world.generate(shape, NOTHING.model_copy(update=update), 6) == plain
    assert keeps_the_law(shape, NOTHING, samples=600)


@pytest.mark.parametrize("update", [{}, {"typical_epsilon": 0.5, "typical_delta": 1.0}, {"top_k": 2}], ids=str)
def test_typical_chains_have_the_law_of_their_definition(update):
    world, params = TableWorld(vocabulary=4, seed=4), TYPICAL.model_copy(update=update)
    law = typical_law(world, params, SHORT_CHAIN.depth, 3)
    torch.testing.assert_close(float(law.sum()), 1.0)
    assert fits(counts_of(world, SHORT_CHAIN, params), law)
    sampled = params.model_copy(update={"acceptance_method": "gumbel_coupled"})
    assert not fits(counts_of(world, SHORT_CHAIN, sampled), law), "sampling has another law"


def follows_the_root(tree, log_p, sampler, root_position) -> Accepted:
    """Draws the next token from the root's distribution instead of the last accepted node's."""
    result = accept_typical(tree, log_p, sampler, root_position)
    next_token = int(sampler.choose(log_p[:1], root_position + len(result.path) + 1))
    return Accepted(result.path, result.tokens, next_token)


def asks_for_nothing(tree, log_p, sampler, root_position) -> Accepted:
    """Accepts whatever is possible."""
    params = sampler.params.model_copy(update={"typical_epsilon": 0.0})
    return accept_typical(tree, log_p, Sampler(params, log_p.shape[1], CPU), root_position)


@pytest.mark.parametrize("fault", [follows_the_root, asks_for_nothing])
def test_a_biased_typical_rule_fails_the_check(fault, monkeypatch):
    world = TableWorld(vocabulary=4, seed=4)
    monkeypatch.setattr(accept_module, "accept_typical", fault)
    assert not fits(counts_of(world, SHORT_CHAIN, TYPICAL), typical_law(world, TYPICAL, SHORT_CHAIN.depth, 3))
