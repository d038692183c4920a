"""Real answers have the target's law, plain and speculative, also when drafts change their depth or stop early."""

import pytest
from laws import (
    ADAPTIVE_CHAIN,
    ADAPTIVE_TREE,
    COUPLING,
    PROMPT,
    REJECTION,
    SHORT_CHAIN,
    SHORT_DYNAMIC,
    SIBLINGS,
    answers_keep_the_law,
    decoder_keeps_the_law,
    longer_answers,
)
from rehearsed import Rehearsed
from tiny_targets import MAX_POSITIONS

from moray.decoding.plain import PlainDecoder
from moray.drafters.configs import NgramConfig
from moray.targets.head import TargetHead
from moray.trees.shapes import ChainShape

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


ECHOES = [1, 3, 0, 2, 1, 3, 2, 0, 1, 3]
"""A prompt in which prompt lookup finds some continuations and not others."""


def test_plain_decoding_is_the_yardstick(four_tokens):
    """The baseline itself draws from the exact law, so that equality with it means something."""
    decoder = PlainDecoder(four_tokens.target, MAX_POSITIONS)
    assert decoder_keeps_the_law(four_tokens, decoder, COUPLING, samples=600)


@pytest.mark.parametrize("params", [REJECTION, COUPLING], ids=["rejection", "coupled"])
@pytest.mark.parametrize("shape", [ChainShape(type="chain", depth=1), SIBLINGS], ids=["chain", "tree"])
def test_real_answers_have_the_target_s_law(four_tokens, shape, params):
    assert answers_keep_the_law(four_tokens, shape, params)


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize(
    ("shape", "params"),
    [(ADAPTIVE_CHAIN, REJECTION), (ADAPTIVE_TREE, REJECTION)],
    ids=["chain", "tree"],
)
def test_adaptive_drafts_keep_the_target_s_law(four_tokens, shape, params):
    keeps, drafted = longer_answers(four_tokens, Rehearsed(four_tokens.target, 1.0), shape, params, PROMPT)
    assert keeps
    assert drafted == set(range(shape.depth + 1)), "no draft, and every depth"


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("shape", [SHORT_CHAIN, SHORT_DYNAMIC, ADAPTIVE_CHAIN], ids=lambda shape: shape.name)
def test_drafts_that_stop_early_keep_the_target_s_law(four_tokens, shape):
    """Prompt lookup: where a sampled chain ends depends on the tokens drawn for it."""
    drafter = NgramConfig(type="ngram", min_ngram=2, max_ngram=3).build(TargetHead.of(four_tokens.target)).eval()
    keeps, drafted = longer_answers(four_tokens, drafter, shape, REJECTION, ECHOES)
    assert keeps
    assert 0 in drafted
    assert len(drafted) >= 2, "no draft was cut short"
