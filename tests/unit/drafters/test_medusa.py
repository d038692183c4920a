"""Medusa against its definition: head k on the hidden state of token i-k predicts the token after i."""

import pytest
import torch
from reference import Reference, scrambled
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target
from torch import Tensor

from moray.decoding.generate import SpeculativeDecoder
from moray.distill.configs import LossConfig
from moray.distill.losses import distillation_loss
from moray.distill.masks import loss_positions
from moray.drafters.configs import MedusaConfig
from moray.drafters.learner import DraftView
from moray.drafters.medusa import Medusa
from moray.errors import ConfigError
from moray.trees.shapes import ChainShape

HEADS = 4
CONFIGS = {
    "own": MedusaConfig(type="medusa", num_heads=HEADS),
    "reduced": MedusaConfig(type="medusa", num_heads=HEADS, draft_vocab_size=50),
    "frozen": MedusaConfig(type="medusa", num_heads=HEADS, num_blocks=2, projections="frozen"),
    "frozen and reduced": MedusaConfig(type="medusa", num_heads=HEADS, projections="frozen", draft_vocab_size=50),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("medusa"), num_hidden_layers=2, hidden_size=32)


@pytest.fixture(params=CONFIGS)
def fresh(request, tiny) -> Medusa:
    """Untrained."""
    drafter = build(tiny, CONFIGS[request.param])
    assert isinstance(drafter, Medusa)
    return drafter


def batch_for(tiny, drafter: Medusa):
    return batch_of(tiny.target, [tiny.prompt(0, 16), tiny.prompt(1, 12)], 5, drafter.needs)


def view_of(batch) -> DraftView:
    rows, seq = batch.tokens.shape
    return DraftView(torch.arange(-1, seq - 1).clamp(min=0).expand(rows, seq), torch.zeros(rows, dtype=torch.bool))


class MedusaReference(Reference):
    """The formulas of Medusa for one token."""

    def __init__(self, drafter: Medusa) -> None:
        super().__init__(drafter)
        self.num_blocks = drafter.config.num_blocks
        self.tokens = self.weights.get("vocabulary.tokens", torch.arange(len(self.lm_head))).long()

    def logits(self, head: int, x: Tensor) -> Tensor:
        """Of head 1, 2, ..."""
        for block in range(self.num_blocks):
            inner = self.weights[f"block_weights.{block}"][head - 1] @ x
            inner = inner + self.weights[f"block_biases.{block}"][head - 1, 0]
            x = x + inner * torch.sigmoid(inner)
        own = self.weights.get("projections")
        return (self.lm_head[self.tokens] if own is None else own[head - 1]) @ x


def test_head_k_reads_the_hidden_state_k_tokens_back(tiny, fresh):
    drafter = scrambled(fresh, 0.1)
    batch, reference = batch_for(tiny, drafter), MedusaReference(drafter)
    with torch.no_grad():
        predictions = drafter(batch, view_of(batch)).predictions
    assert len(predictions) == HEADS
    for head, prediction in enumerate(predictions, start=1):
        for row in range(2):
            logits = prediction.score(prediction.hidden[row]).detach().double()
            for i in range(batch.tokens.shape[1]):
                if i < head:
                    assert int(prediction.start[row, i]) == i, "there is no such token: this position does not count"
                    continue
                assert int(prediction.start[row, i]) == i - head
                wanted = reference.logits(head, batch.taps.hidden[-1][row, i - head].double())
                torch.testing.assert_close(logits[i], wanted, rtol=1e-3, atol=1e-3)


def test_drafts_depend_on_the_last_verified_token_alone(tiny, fresh):
    drafter = scrambled(fresh, 0.1)
    batch, reference = batch_for(tiny, drafter), MedusaReference(drafter)
    state = drafter.new_state(32, 32)
    for begin, end in ((0, 7), (7, 8), (8, 11)):
        feature = batch.taps.hidden[-1][:1, begin:end]
        drafter.extend(state, batch.tokens[0, begin:end], {"feature": feature})
        for depth in range(HEADS):
            with torch.no_grad():
                logits = drafter.step(state, torch.tensor([3, 9]), torch.eye(2, dtype=torch.bool), depth).double()
            wanted = torch.full_like(logits[0], -torch.inf)
            wanted[reference.tokens] = reference.logits(depth + 1, feature[0, -1].double())
            torch.testing.assert_close(logits, wanted.expand(2, -1), rtol=1e-3, atol=1e-3)


def test_untrained_heads_give_exactly_the_target_s_logits(tiny, fresh):
    """At its start every head repeats what the target says of the next token."""
    batch = batch_for(tiny, fresh)
    feature = batch.taps.hidden[-1][0, 6]
    wanted = fresh.head.logits(feature).detach()
    state = fresh.new_state(32, 32)
    fresh.extend(state, batch.tokens[0, :7], {"feature": batch.taps.hidden[-1][:1, :7]})
    with torch.no_grad():
        output = fresh(batch, view_of(batch))
        for depth, prediction in enumerate(output.predictions):
            drafted = fresh.step(state, torch.tensor([1]), None, depth)[0]
            known = drafted.isfinite()
            assert int(known.sum()) == fresh.vocabulary.size
            torch.testing.assert_close(drafted[known], wanted[known], rtol=1e-5, atol=1e-5)
            assert int(drafted.argmax()) == int(wanted.where(known, torch.tensor(-torch.inf)).argmax())
            assert torch.equal(prediction.hidden[0, 7 + depth], feature)


def test_the_loss_of_head_k_counts_decay_to_the_k_th_and_all_together_one(tiny):
    decay = 0.6
    config = CONFIGS["own"].model_copy(update={"decay": decay})
    drafter = scrambled(build(tiny, config), 0.1)
    batch, reference = batch_for(tiny, drafter), MedusaReference(drafter)
    positions = loss_positions(batch)
    output = drafter(batch, view_of(batch))
    sums = distillation_loss(output, batch, positions, drafter, LossConfig(feature=0.0, kl=0.7, total_variation=0.3))
    shares = [decay**head for head in range(1, HEADS + 1)]
    kl = rejection = 0.0
    correct, counted = [0] * 8, [0] * 8
    for head, share in enumerate(shares, start=1):
        for row, i in positions.nonzero().tolist():
            if i < head:
                continue
            p = (reference.lm_head @ batch.taps.hidden[-1][row, i].double()).softmax(0)
            q = reference.logits(head, batch.taps.hidden[-1][row, i - head].double()).softmax(0)
            kl += share / sum(shares) * float((p * (p / q).log()).sum())
            rejection += share / sum(shares) * (1.0 - float(torch.minimum(p, q).sum()))
            correct[head - 1] += int(p.argmax() == q.argmax())
            counted[head - 1] += 1
    assert float(sums.kl) == pytest.approx(kl, rel=1e-3)
    assert float(sums.rejection) == pytest.approx(rejection, rel=1e-3)
    assert float(sums.total.detach()) == pytest.approx(0.7 * kl + 0.3 * rejection, rel=1e-3)
    assert sums.correct_by_step.tolist() == correct
    assert sums.count_by_step.tolist() == counted
    assert 0.0 <= float(sums.rejection) / int(sums.count) <= 1.0, "a mean probability"


def test_heads_beyond_a_short_text_count_nothing(tiny):
    drafter = build(tiny, VARIANTS["medusa-1"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 3)], 1, drafter.needs)
    output = drafter(batch, view_of(batch))
    sums = distillation_loss(output, batch, loss_positions(batch), drafter, LossConfig(feature=0.0))
    assert sums.count_by_step.tolist() == [1] + [0] * 7
    assert bool(torch.isfinite(sums.total))


def test_a_tree_deeper_than_its_heads_is_refused_with_both_numbers(tiny, fresh):
    shape = ChainShape(type="chain", depth=HEADS + 1)
    with pytest.raises(ConfigError, match=r"is 5 levels deep; drafter 'medusa' drafts at most 4"):
        SpeculativeDecoder(tiny.target, fresh, shape, 64)
