"""A draft vocabulary that is cut down after training: scores stay, text stays, rare tokens are never proposed."""

import pytest
import torch
from side_by_side import COUPLED, GREEDY, SHAPES, is_lossless, speculate
from tiny_batches import taps_of
from tiny_drafters import TRAINED, VARIANTS, build, overfit
from tiny_targets import VOCABULARY, TinyTarget, load_target

from moray.decoding.params import SamplingParams
from moray.drafters.base import Drafter
from moray.drafters.checkpoint import load_drafter, save_drafter
from moray.errors import ConfigError

COUNTS = torch.arange(VOCABULARY) % 60
"""Tokens 59, then 58 and so on are the most frequent."""
FEW = 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("restricted"))


def scores(tiny: TinyTarget, drafter: Drafter) -> torch.Tensor:
    """Of every token after a short text."""
    text = torch.tensor(tiny.prompt(0, 6))
    state = drafter.new_state(16, 4)
    drafter.extend(state, text, drafter.observe(taps_of(tiny.target, text[None], drafter.observed)))
    with torch.no_grad():
        found = drafter.step(state, torch.tensor([1]), None, 0)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("name", TRAINED)
def test_tokens_that_stay_keep_their_scores_and_others_are_impossible(tiny, name):
    drafter = build(tiny, VARIANTS[name])
    before = scores(tiny, drafter)
    allowed = before.isfinite().nonzero().flatten()
    frequent = allowed[COUNTS[allowed].sort(descending=True, stable=True).indices][:FEW].sort().values
    drafter.restrict_vocabulary(COUNTS, FEW)
    after = scores(tiny, drafter)
    assert torch.equal(after.isfinite().nonzero().flatten(), frequent)
    torch.testing.assert_close(after[frequent], before[frequent])
    assert drafter.vocabulary.is_reduced
    assert drafter.vocabulary.size == drafter.config.num_draft_tokens == FEW
    assert all(VOCABULARY not in weight.shape and 90 not in weight.shape for weight in drafter.step_weights())


@pytest.mark.parametrize("name", TRAINED)
def test_a_restricted_drafter_is_saved_and_loaded_as_it_is(tiny, name, tmp_path):
    drafter = build(tiny, VARIANTS[name])
    drafter.restrict_vocabulary(COUNTS, FEW)
    save_drafter(tmp_path, drafter, "text-1")
    loaded = load_drafter(tmp_path, drafter.head, "text-1")
    assert loaded.config == drafter.config
    assert torch.equal(scores(tiny, loaded), scores(tiny, drafter))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", TRAINED)
def test_text_does_not_depend_on_it(tiny, name):
    drafter = build(tiny, VARIANTS[name])
    drafter.restrict_vocabulary(COUNTS, FEW)
    for shape in (SHAPES["chain"], SHAPES["dynamic"]):
        assert is_lossless(tiny, drafter, shape, GREEDY, [tiny.prompt(), tiny.prompt(1, 5)], 20)
        assert is_lossless(tiny, drafter, shape, COUPLED, [tiny.prompt()], 12)
    rejection = SamplingParams(temperature=0.8, seed=7, acceptance_method="rejection")
    assert len(speculate(tiny, drafter, SHAPES["chain"], tiny.prompt(), rejection, 12).tokens) == 12


@pytest.mark.parametrize("name", ["moa-0", "medusa-0", "independent-0"])
def test_what_was_learnt_is_still_proposed(tiny, name):
    """Only the text's own tokens are left: what was accepted before still is, in as few cycles."""
    prompt = tiny.prompt()
    text = tiny.hugging_face(prompt, 30)
    drafter = overfit(tiny, build(tiny, VARIANTS[name]), prompt + text, len(prompt))
    whole = speculate(tiny, drafter, SHAPES["chain"], prompt, GREEDY, 30)
    drafter.restrict_vocabulary(torch.bincount(torch.tensor(text), minlength=VOCABULARY), len(set(text)))
    cut = speculate(tiny, drafter, SHAPES["chain"], prompt, GREEDY, 30)
    assert cut.tokens == whole.tokens == text
    assert cut.num_cycles <= whole.num_cycles < 25


def test_one_restricted_already_is_restricted_further(tiny):
    drafter = build(tiny, VARIANTS["eagle-1"])
    drafter.choose_vocabulary(COUNTS)
    drafter.restrict_vocabulary(COUNTS, 30)
    drafter.restrict_vocabulary(COUNTS, 3)
    assert drafter.vocabulary.tokens is not None
    assert drafter.vocabulary.tokens.tolist() == [57, 58, 59]


def test_what_cannot_be_restricted_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 5; a drafter of type ngram has no draft vocabulary"):
        build(tiny, VARIANTS["ngram-0"]).restrict_vocabulary(COUNTS, 5)
    for size in (60, 97, 1):
        with pytest.raises(ConfigError, match=rf"draft_vocab_size is {size}; this drafter has 60 tokens: give 2 to 59"):
            build(tiny, VARIANTS["eagle-1"]).restrict_vocabulary(COUNTS, size)
