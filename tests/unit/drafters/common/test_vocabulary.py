"""A reduced draft vocabulary: which tokens are in it, what is outside of it, and what the losses make of it."""

import pytest
import torch
from side_by_side import SHAPES, is_lossless, speculate
from tiny_batches import batch_of, taps_of
from tiny_drafters import build, overfit
from tiny_targets import MAX_POSITIONS, TinyTarget, load_target

from moray.decoding.params import SamplingParams
from moray.distill.configs import LossConfig
from moray.distill.losses import distillation_loss
from moray.distill.masks import loss_positions
from moray.drafters.checkpoint import load_drafter, save_drafter
from moray.drafters.common.vocabulary import DraftVocabulary
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import EagleConfig, GlideConfig, IndependentConfig, MedusaConfig, MoAConfig
from moray.drafters.learner import DraftView
from moray.errors import ConfigError
from moray.targets.head import TargetHead

FULL = 97
LAYER = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=40)


def eagle_with(size: int | None) -> EagleConfig:
    return EagleConfig(type="eagle", layer=LAYER, draft_vocab_size=size)


PROJECTING = {
    "the target's lm_head": eagle_with(30),
    "heads of its own": MedusaConfig(type="medusa", draft_vocab_size=30),
    "a copied lm_head": IndependentConfig(
        type="independent", hidden_size=32, head_dim=8, layer=LAYER, embeddings="copied", draft_vocab_size=30
    ),
    "a random lm_head": IndependentConfig(
        type="independent", hidden_size=24, head_dim=8, layer=LAYER, draft_vocab_size=30
    ),
    "the target's lm_head behind its last layer": MoAConfig(
        type="moa",
        target_layers=1,
        mask_width=(4, 7),
        layer_self_attention=LAYER,
        self_attention=LAYER,
        cross_attention=LAYER,
        draft_vocab_size=30,
    ),
    "the target's lm_head behind cross-attention": GlideConfig(
        type="glide", layer=LAYER, num_cross_heads=4, draft_vocab_size=30
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("vocabulary"), num_hidden_layers=2, hidden_size=32)


@pytest.fixture(scope="module")
def head(tiny) -> TargetHead:
    return TargetHead.of(tiny.target)


def chosen(head: TargetHead, size: int, counts: dict[int, int]) -> DraftVocabulary:
    vocabulary = DraftVocabulary(head, size)
    vocabulary.choose(torch.tensor([counts.get(token, 0) for token in range(FULL)]))
    return vocabulary


# --- Which tokens ---


def test_the_most_frequent_tokens_are_chosen_in_order_of_their_ids(head):
    vocabulary = chosen(head, 3, {96: 9, 4: 7, 50: 8, 51: 6})
    assert vocabulary.tokens.tolist() == [4, 50, 96]
    assert vocabulary.size == 3
    assert vocabulary.is_reduced


def test_of_equally_frequent_tokens_those_with_the_lowest_ids_are_chosen(head):
    assert chosen(head, 4, {90: 5, 80: 2, 70: 2, 60: 2, 50: 2}).tokens.tolist() == [50, 60, 70, 90]
    assert chosen(head, 5, {30: 1}).tokens.tolist() == [0, 1, 2, 3, 30], "tokens never seen fill up"
    assert chosen(head, 60, {}).tokens.tolist() == list(range(60))


def test_choosing_again_replaces_the_first_choice(head):
    vocabulary = chosen(head, 2, {10: 1, 11: 1})
    vocabulary.choose(torch.bincount(torch.tensor([20, 21, 21]), minlength=FULL))
    assert vocabulary.tokens.tolist() == [20, 21]
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(vocabulary.logits(hidden), head.logits(hidden)[:, [20, 21]])


def test_the_whole_vocabulary_is_left_as_it_is(head):
    vocabulary = DraftVocabulary(head, None)
    vocabulary.choose(torch.bincount(torch.tensor([20, 21, 21]), minlength=FULL))
    hidden = torch.randn(3, 32)
    logits = vocabulary.logits(hidden)
    assert torch.equal(logits, head.logits(hidden))
    assert vocabulary.expand(logits) is logits
    assert vocabulary.select(logits) is logits
    assert vocabulary.to_tokens(torch.tensor([5, 90])).tolist() == [5, 90]
    assert not vocabulary.is_reduced
    assert vocabulary.state_dict() == {}


def test_one_larger_than_the_target_s_is_refused_with_both_sizes(tiny, head):
    assert DraftVocabulary(head, FULL).size == FULL
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 98; the target has 97 tokens"):
        build(tiny, eagle_with(98))


# --- What is outside ---


def test_draft_ids_stand_for_tokens_and_all_others_are_impossible(head):
    vocabulary = chosen(head, 3, {96: 9, 4: 7, 50: 8})
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    full, logits = head.logits(hidden), vocabulary.logits(hidden)
    torch.testing.assert_close(logits, full[:, [4, 50, 96]])
    expanded = vocabulary.expand(logits)
    wanted = torch.full_like(full, -torch.inf)
    for token in (4, 50, 96):
        wanted[:, token] = full[:, token]
    torch.testing.assert_close(expanded, wanted)
    assert torch.equal(vocabulary.select(expanded), logits)
    assert vocabulary.to_tokens(torch.tensor([[0, 2], [1, 0]])).tolist() == [[4, 96], [50, 4]]


@pytest.mark.parametrize("name", PROJECTING)
def test_a_saved_drafter_keeps_its_vocabulary_and_its_scores(tiny, name, tmp_path):
    """Built anew it holds the first 30 tokens; loading brings back those that were chosen, and their rows."""
    drafter = build(tiny, PROJECTING[name])
    drafter.choose_vocabulary(torch.arange(FULL) % 60)
    tokens = drafter.vocabulary.tokens.tolist()
    assert tokens == [*range(33, 60), *range(94, 97)], "a token is as frequent as it is high, up to 59"
    save_drafter(tmp_path, drafter, "text-1")
    loaded = load_drafter(tmp_path, drafter.head, "text-1")
    assert loaded.vocabulary.tokens.tolist() == tokens
    text = torch.tensor(tiny.prompt(0, 6))
    taps = taps_of(tiny.target, text[None], drafter.observed)
    scores = []
    for one in (drafter, loaded):
        state = one.new_state(16, 4)
        one.extend(state, text, one.observe(taps))
        with torch.no_grad():
            scores.append(one.step(state, torch.tensor([1]), None, 0)[0])
    assert torch.equal(*scores)
    assert scores[0].isfinite().nonzero().flatten().tolist() == tokens


# --- Decoding ---


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("size", [2, 20])
def test_the_text_does_not_depend_on_the_draft_vocabulary(tiny, shape, size):
    """Even one that is smaller than a node's number of children."""
    drafter = build(tiny, eagle_with(size))
    for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=7)):
        assert is_lossless(tiny, drafter, shape, params, [tiny.prompt(), tiny.prompt(2, 20)], 12)
    rejection = SamplingParams(temperature=0.8, seed=7, acceptance_method="rejection")
    assert len(speculate(tiny, drafter, shape, tiny.prompt(), rejection, 12).tokens) == 12


def test_tokens_outside_are_emitted_but_never_drafted(tiny):
    drafter = build(tiny, MedusaConfig(type="medusa", num_heads=4, draft_vocab_size=2))
    text = tiny.hugging_face(tiny.prompt(), 30)
    generation = speculate(tiny, drafter, SHAPES["chain"], tiny.prompt(), SamplingParams(), 30)
    assert generation.tokens == text
    assert len(set(text)) > 2
    position = 1
    for accepted, emitted in zip(generation.accepted, generation.emitted, strict=True):
        assert set(text[position : position + accepted]) <= set(drafter.vocabulary.tokens.tolist())
        position += emitted
    assert position == 30 <= MAX_POSITIONS


@pytest.mark.parametrize("name", PROJECTING)
def test_every_drafter_learns_and_drafts_within_its_vocabulary(tiny, name):
    """Taught a text whose tokens are more than its vocabulary: it gets some of them accepted, and loses none."""
    prompt = tiny.prompt()
    text = tiny.hugging_face(prompt, 40)  # what `build` chooses the vocabulary by
    config = PROJECTING[name].model_copy(update={"draft_vocab_size": 4})
    drafter = overfit(tiny, build(tiny, config), prompt + text, len(prompt))
    known = set(drafter.vocabulary.tokens.tolist())
    assert len(known) == 4 < len(set(text))
    for shape in ("chain", "dynamic"):
        generation = speculate(tiny, drafter, SHAPES[shape], prompt, SamplingParams(), 40)
        assert generation.tokens == text
        position, drafted = 1, []
        for accepted, emitted in zip(generation.accepted, generation.emitted, strict=True):
            drafted += text[position : position + accepted]
            position += emitted
        assert set(drafted) <= known
        assert len(drafted) >= 5, "nothing learnt"


# --- Losses ---


def test_losses_compare_with_the_target_on_the_draft_vocabulary(tiny):
    """KL with the target renormalised there, rejection with the target as it is, hits by token ids."""
    drafter = build(tiny, eagle_with(40))
    batch = batch_of(tiny.target, [tiny.prompt(0, 20), tiny.prompt(1, 15)], 5, drafter.needs)
    hidden = batch.taps.hidden[-1]
    tokens = sorted(set(drafter.head.logits(hidden).argmax(-1).flatten().tolist()))[::2]  # half of what it says
    drafter.choose_vocabulary(torch.bincount(torch.tensor(tokens * 2), minlength=FULL))
    tokens = drafter.vocabulary.tokens.tolist()
    before = torch.arange(-1, 19).clamp(min=0).expand(2, 20)
    output = drafter(batch, DraftView(before, torch.zeros(2, dtype=torch.bool)))
    # A drafter that is often right: its hidden states are the target's own with some noise.
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    drafted = (hidden + 0.3 * noise).requires_grad_()
    output.predictions[0].hidden.data.copy_(drafted.data)
    positions = loss_positions(batch)
    weights = LossConfig(feature=0.0, kl=0.4, total_variation=0.6)
    sums = distillation_loss(output, batch, positions, drafter, weights)
    lm_head, kl, rejection, hits, missed = drafter.head.weight.double(), 0.0, 0.0, 0, 0
    for row, i in positions.nonzero().tolist():
        target = (lm_head @ hidden[row, i].double()).softmax(0).tolist()
        exponentials = [float((lm_head[token] @ drafted[row, i].detach().double()).exp()) for token in tokens]
        own = {token: value / sum(exponentials) for token, value in zip(tokens, exponentials, strict=True)}
        mass = sum(target[token] for token in tokens)
        for token in tokens:
            p = torch.tensor(target[token] / mass, dtype=torch.float64)
            kl += float(p * (p / own[token]).log())
        rejection += 1.0 - sum(min(target[token], own[token]) for token in tokens)
        best = max(range(FULL), key=lambda token: target[token])
        hits += max(tokens, key=lambda token: own[token]) == best
        missed += best not in tokens
    assert int(sums.count) == int(positions.sum()) == sum(sums.count_by_step.tolist())
    assert float(sums.kl) == pytest.approx(kl, rel=1e-3)
    assert float(sums.rejection) == pytest.approx(rejection, rel=1e-3)
    assert float(sums.total.detach()) == pytest.approx(0.4 * kl + 0.6 * rejection, rel=1e-3)
    assert sum(sums.correct_by_step.tolist()) == hits
    assert hits >= 5, "nothing right: token ids were not put to the test"
    assert missed >= 5, "nothing outside"
