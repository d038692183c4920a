"""Verifiers with a known bias fail the checks of the law: the checks can fail."""

import pytest
import torch
from biased import FAULTS, with_residual
from laws import (
    ADAPTIVE_CHAIN,
    COUPLING,
    CPU,
    PROMPT,
    REJECTION,
    SHORT_CHAIN,
    TableWorld,
    answers_keep_the_law,
    keeps_the_law,
    longer_answers,
)
from rehearsed import Rehearsed

from moray.decoding.params import SamplingParams
from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.accept import Accepted
from moray.decoding.sampling.sampler import Sampler, counter_uniform
from moray.trees.shapes import ChainShape, FixedShape

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

FEWER = 500
"""Samples that show a gross bias. Of the finer ones below some need all of `keeps_the_law`."""


def test_the_rule_that_the_faults_are_made_of_is_right(monkeypatch):
    """With the right residual it passes: so what fails below is the fault and not the frame around it."""
    monkeypatch.setattr(accept_module, "accept_by_rejection", with_residual(lambda p, q: (p - q).clamp(min=0)))
    assert keeps_the_law(SHORT_CHAIN, REJECTION, samples=FEWER)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_biased_verifier_fails_the_check(fault, monkeypatch):
    monkeypatch.setattr(accept_module, *FAULTS[fault])
    assert not keeps_the_law(SHORT_CHAIN, REJECTION, samples=FEWER)


@pytest.mark.parametrize("fault", ["accepts always", "residual from p"])
def test_a_biased_verifier_fails_on_real_answers(four_tokens, fault, monkeypatch):
    monkeypatch.setattr(accept_module, *FAULTS[fault])
    assert not answers_keep_the_law(four_tokens, ChainShape(type="chain", depth=1), REJECTION)


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("fault", ["accepts always", "residual from p"])
def test_a_biased_verifier_fails_on_adaptive_drafts(four_tokens, fault, monkeypatch):
    monkeypatch.setattr(accept_module, *FAULTS[fault])
    assert not longer_answers(four_tokens, Rehearsed(four_tokens.target, 1.0), ADAPTIVE_CHAIN, REJECTION, PROMPT)[0]


def test_siblings_without_renormalising_fail_the_check(monkeypatch):
    """The second sibling tested against the target's p, as if the first had not been refused."""

    def forgetful(tree, probs, sampler, root_position):
        tests = sampler.uniform(accept_module.STREAM_TEST, root_position + 1, 2)
        p = probs[0].double()
        for test, child in zip(tests, (1, 2), strict=True):
            token = int(tree.tokens[child])
            if bool(test < p[token]):
                return Accepted([child], [token], int(sampler.choose(probs[child][None].log(), root_position + 2)))
        p[tree.tokens[1:3]] = 0.0
        noise = accept_module.gumbel(sampler.uniform(accept_module.STREAM_RESIDUAL, root_position + 1, p.shape[0]))
        return Accepted([], [], int((p.log() + noise).argmax()))

    monkeypatch.setattr(accept_module, "accept_by_rejection", forgetful)
    assert not keeps_the_law(FixedShape(type="fixed", branching=(2,)), REJECTION)


def test_a_q_that_was_not_sampled_from_fails_the_check(monkeypatch):
    """Drafts come from the filtered q, the test is handed the unfiltered one."""
    original = Sampler.selector

    def selector(self, root_position, depth, is_chain):
        select = original(self, root_position, depth, is_chain)

        def unfiltered(logits, level, children):
            tokens, scores, _ = select(logits, level, children)
            return tokens, scores, logits.softmax(dim=-1)

        return unfiltered

    world, params = (
        TableWorld(vocabulary=4, seed=2),
        SamplingParams(temperature=0.7, top_k=3, acceptance_method="rejection"),
    )
    assert keeps_the_law(SHORT_CHAIN, params, world=world)
    monkeypatch.setattr(Sampler, "selector", selector)
    assert not keeps_the_law(SHORT_CHAIN, params, world=world)


def test_ignored_filters_fail_the_check(monkeypatch):
    original = Sampler.log_probs

    def unfiltered(self, logits):
        return original(Sampler(self.params.model_copy(update={"top_k": 0, "top_p": 1.0}), 4, CPU), logits)

    world, params = TableWorld(vocabulary=4, seed=2), SamplingParams(temperature=0.7, top_p=0.7)
    monkeypatch.setattr(Sampler, "log_probs", unfiltered)
    assert not keeps_the_law(SHORT_CHAIN, params, world=world, samples=300)


def test_coupled_noise_that_ignores_the_position_fails_the_check(monkeypatch):
    """One noise for all positions gives every token its own law, but their joint law is wrong."""

    def stuck(self, first_position, count):
        return accept_module.gumbel(
            counter_uniform(self.params.seed, 0, torch.zeros(count, dtype=torch.long), self._vocab_size)
        )

    monkeypatch.setattr(Sampler, "noise", stuck)
    assert not keeps_the_law(SHORT_CHAIN, COUPLING, samples=FEWER)
