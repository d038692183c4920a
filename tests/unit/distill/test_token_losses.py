"""Losses over the vocabulary against the plain formula under autograd, in float64; and the memory they take."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from memory_use import memory_use
from reference import scrambled
from tiny_batches import batch_of
from tiny_drafters import TRAINED, VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.batch import Taps, TrainBatch
from moray.distill import losses, token_losses
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.losses import LossSums, distillation_loss
from moray.distill.masks import draw_view, loss_positions, verified_start
from moray.distill.objective import Objective
from moray.drafters.learner import DraftOutput, DraftView, Prediction
from moray.errors import ConfigError

WEIGHTS = {
    "kl": LossConfig(feature=0.0, kl=0.7),
    "acceptance": LossConfig(feature=0.0, kl=0.0, total_variation=0.9),
    "all": LossConfig(feature=0.5, kl=0.3, total_variation=0.2),
    "top": LossConfig(feature=0.0, kl=0.6, kl_top_k=9, total_variation=0.1),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("token_losses"), num_hidden_layers=3)


def plain_loss(output, batch, positions, drafter, weights) -> torch.Tensor:
    """All positions at once, every logit kept."""
    column = torch.arange(positions.shape[1])
    total = torch.zeros(())
    for depth, (predicted, scale, weight) in output.features.items():
        made = positions & (output.predictions[0].start != column)
        gap = F.smooth_l1_loss(predicted[made] / scale, batch.taps.hidden[depth][made] / scale, reduction="none")
        share = weight[made.nonzero()[:, 0]] if isinstance(weight, torch.Tensor) else weight
        total = total + weights.feature * (share * gap.mean(dim=-1)).sum()
    for prediction in output.predictions:
        made = positions & (prediction.start != column)
        target = drafter.vocabulary.select(drafter.head.logits(batch.taps.hidden[-1][made]).log_softmax(-1))
        draft = prediction.score(prediction.hidden[made]).log_softmax(-1)
        known, guess = target.log_softmax(-1), draft
        if weights.kl_top_k is not None:
            known, guess = top_and_rest(known, guess, weights.kl_top_k)
        kl = F.kl_div(guess, known, reduction="sum", log_target=True)
        refused = (1.0 - torch.minimum(target.exp(), draft.exp()).sum(dim=-1)).sum()
        total = total + prediction.weight * (weights.kl * kl + weights.total_variation * refused)
    return total


def top_and_rest(known: torch.Tensor, guess: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of the k most likely tokens of `known`, and of all others together, of both."""
    order = known.argsort(dim=-1, descending=True)
    pairs = (log.gather(1, order) for log in (known, guess))
    first, second = (torch.cat([log[:, :k], log[:, k:].logsumexp(-1, keepdim=True)], dim=1) for log in pairs)
    return first, second


def in_double(output: DraftOutput, batch: TrainBatch) -> tuple[DraftOutput, TrainBatch, list[torch.Tensor]]:
    """The same predictions and taps in float64, and the leaves that gradients are wanted of."""
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.detach().double().requires_grad_())
        return leaves[-1]

    predictions = tuple(
        Prediction(leaf(p.hidden), p.start, p.project, p.weight, tuple(leaf(w) for w in p.trained))
        for p in output.predictions
    )
    features = {
        depth: feature._replace(predicted=leaf(feature.predicted)) for depth, feature in output.features.items()
    }
    taps = Taps(hidden={depth: hidden.double() for depth, hidden in batch.taps.hidden.items()})
    return DraftOutput(predictions, features), replace(batch, taps=taps), leaves


def total_loss(output, batch, positions, drafter, weights) -> torch.Tensor:
    return distillation_loss(output, batch, positions, drafter, weights).total


@pytest.mark.parametrize("terms", WEIGHTS)
@pytest.mark.parametrize("name", [*TRAINED, "moa-1 reduced", "glide-0 reduced"])
def test_values_and_gradients_are_those_of_the_plain_formula(monkeypatch, request, tiny, name, terms):
    monkeypatch.setattr(token_losses, "_MAX_CHUNK", 7)
    name, _, reduced = name.partition(" ")
    drafter = build(tiny, VARIANTS[name].model_copy(update={"draft_vocab_size": 60} if reduced else {}))
    is_unrolled = getattr(drafter.config, "ttt_steps", 1) > 1
    if not is_unrolled:  # through several steps the gradients of scrambled weights explode
        scrambled(drafter)
    batch = batch_of(tiny.target, [tiny.prompt(0, 24), tiny.prompt(1, 17)], 5, drafter.needs)
    start = verified_start(batch.response_mask, torch.tensor([5, 4]), torch.tensor([0, 3]))
    if is_unrolled:  # every step counts from the one before it
        start = torch.arange(-1, start.shape[1] - 1).clamp(min=0).expand_as(start)
    output = drafter(batch, DraftView(start, None, layer_counts=drafter.layer_counts[:2]))
    weights, positions = WEIGHTS[terms], loss_positions(batch)
    if terms == "all":  # down to every weight, as precisely as single precision has it
        both = [f(output, batch, positions, drafter, weights) for f in (plain_loss, total_loss)]
        expected, found = (torch.autograd.grad(loss, list(drafter.parameters()), retain_graph=True) for loss in both)
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm()) <= 1e-4 * float(theirs.norm())
            assert float(theirs.norm()) > 0
    lm_head = tiny.target.model.lm_head.double()
    request.addfinalizer(lm_head.float)
    drafter.vocabulary._forget_rows()
    output, batch, leaves = in_double(output, batch)
    both = [f(output, batch, positions, drafter, weights) for f in (plain_loss, total_loss)]
    torch.testing.assert_close(both[1], both[0], rtol=1e-11, atol=1e-11)
    expected, found = (torch.autograd.grad(3.0 * loss, leaves, allow_unused=True) for loss in both)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None or not ours.any()) if theirs is None else True
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_without_gradients_the_values_are_the_same(tiny):
    drafter = build(tiny, VARIANTS["medusa-0"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 24)], 5, drafter.needs)
    view, weights = (
        DraftView(torch.zeros_like(batch.tokens), None),
        LossConfig(feature=0.0, kl=1.0, total_variation=1.0),
    )
    with_gradients = total_loss(drafter(batch, view), batch, loss_positions(batch), drafter, weights)
    with torch.no_grad():
        without = total_loss(drafter(batch, view), batch, loss_positions(batch), drafter, weights)
    assert not without.requires_grad
    assert torch.equal(without, with_gradients.detach())


def exact(drafter) -> Callable[..., torch.Tensor]:
    rows = drafter.vocabulary.rows
    return lambda hidden: F.linear(hidden, rows)


class Zeros:
    """Packed rows that have lost all precision."""

    def linear(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[0], 60)


VOCABULARY, CHUNK = 3000, 16


@pytest.fixture(scope="module")
def many_tokens(tmp_path_factory) -> TinyTarget:
    folder = tmp_path_factory.mktemp("many")
    return load_target(folder, num_hidden_layers=1, hidden_size=16, vocab_size=VOCABULARY)


@pytest.mark.parametrize("name", ["eagle-0", "medusa-0", "independent-0"])
def test_memory_does_not_grow_with_positions_times_vocabulary(monkeypatch, many_tokens, name):
    monkeypatch.setattr(token_losses, "_MAX_CHUNK", CHUNK)
    drafter = build(many_tokens, VARIANTS[name].model_copy(update={"draft_vocab_size": None}))
    weights = LossConfig(feature=0.0, kl=1.0, total_variation=1.0)

    def use(positions: int):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.zeros(1, positions + 2, dtype=torch.long)
        response = torch.ones_like(tokens, dtype=torch.bool)
        real = torch.randn(1, positions + 2, 16, generator=generator)
        batch = TrainBatch(tokens, response, torch.tensor([positions + 2]), Taps(hidden={-1: real}))
        made = drafter(batch, DraftView((torch.arange(positions + 2) - 1).clamp(min=0)[None], None))
        leaves = [p.hidden.detach().requires_grad_() for p in made.predictions]
        own = [tuple(w.detach().requires_grad_() for w in p.trained) for p in made.predictions]
        output = DraftOutput(
            tuple(
                Prediction(hidden, p.start, p.project, p.weight, trained)
                for p, hidden, trained in zip(made.predictions, leaves, own, strict=True)
            )
        )
        tensors = [*leaves, *(weight for trained in own for weight in trained)]
        return memory_use(
            lambda: torch.autograd.grad(
                distillation_loss(output, batch, loss_positions(batch), drafter, weights).total, tensors
            )
        )

    small, large = use(2 * CHUNK), use(16 * CHUNK)
    assert large.peak < 1.35 * small.peak
    assert large.largest <= max(small.largest, CHUNK * VOCABULARY * 4)


def test_a_reduced_vocabulary_is_trained_without_logits_over_all_tokens(monkeypatch, many_tokens):
    monkeypatch.setattr(token_losses, "_MAX_CHUNK", CHUNK)
    reduced = 100
    drafter = build(many_tokens, VARIANTS["eagle-0"].model_copy(update={"draft_vocab_size": reduced}))
    batch = batch_of(many_tokens.target, [list(range(40))], 5, drafter.needs)
    output = drafter(batch, DraftView((torch.arange(40) - 1).clamp(min=0)[None], None))
    positions, weights = loss_positions(batch), LossConfig(feature=0.0, kl=1.0)

    def largest(with_figures: bool) -> int:
        return memory_use(
            lambda: distillation_loss(output, batch, positions, drafter, weights, with_figures).total
        ).largest

    assert largest(with_figures=False) <= max(CHUNK * reduced, 40 * 16) * 4
    assert largest(with_figures=True) >= CHUNK * VOCABULARY * 4


def test_a_share_of_the_positions_stands_for_all(tiny):
    drafter = build(tiny, VARIANTS["moa-0"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 40), tiny.prompt(1, 33)], 5, drafter.needs)
    view = draw_view(batch, drafter.config.verified_period, 0.0, torch.Generator().manual_seed(0))
    output, positions = drafter(batch, view), loss_positions(batch)
    weights = LossConfig(feature=0.5, kl=1.0, total_variation=0.2, position_share=0.3)

    def sums(weights: LossConfig, seed: int) -> LossSums:
        return distillation_loss(output, batch, positions, drafter, weights, seed=seed)

    every = sums(weights.for_validation(), 0)
    some = [sums(weights, seed) for seed in range(300)]
    assert {int(one.count) for one in some} == {int(every.count)}
    assert int(some[0].count_by_step.sum()) == pytest.approx(0.3 * int(every.count), abs=1)
    assert len({float(one.kl) for one in some}) > 250
    assert torch.equal(some[7].total, sums(weights, 7).total)
    assert {float(one.feature) for one in some} == {float(every.feature)}
    assert sum(float(one.kl) for one in some) / 300 == pytest.approx(float(every.kl), rel=0.05)
    assert sum(float(one.rejection) for one in some) / 300 == pytest.approx(float(every.rejection), rel=0.05)
    total = some[0].total.detach()
    torch.testing.assert_close(total, 0.5 * some[0].feature + some[0].kl + 0.2 * some[0].rejection)


@pytest.mark.parametrize(
    ("count", "share", "drawn"), [(0, 0.3, 0), (1, 0.3, 1), (2, 0.1, 1), (10, 0.26, 3), (10, 1.0, 10)]
)
def test_at_least_one_position_is_drawn_where_there_is_one(count, share, drawn):
    chosen, factor = losses._draw(count, share, 0, torch.device("cpu"))
    places = torch.arange(count)[chosen]
    assert len(places) == drawn == len(set(places.tolist()))
    assert factor * drawn == pytest.approx(count)


def test_a_tail_that_the_drafter_excludes_still_has_a_gradient():
    known_log = torch.tensor([[0.6, 0.1, 0.3]]).log()
    draft_log = torch.tensor([[0.0, -300.0, -302.0]]).log_softmax(-1)
    top = torch.tensor([[True, False, False]])
    target = token_losses._Target(known_log, known_log.exp(), top, None, None)
    divergence, wanted = token_losses._divergence(draft_log, target)
    torch.testing.assert_close(wanted.sum(), torch.tensor(1.0))
    assert wanted[0, 1] > wanted[0, 2] > 0
    assert float(divergence) == pytest.approx(0.6 * math.log(0.6) + 0.4 * (math.log(0.4) + 300), rel=1e-3)


def test_validation_compares_with_the_targets_own_probabilities(tiny):
    """A drafter that decodes may have rounded its rows of lm_head."""
    drafter = build(tiny, VARIANTS["moa-0"].model_copy(update={"draft_vocab_size": 60}))
    batch = batch_of(tiny.target, [tiny.prompt(0, 40)], 5, drafter.needs)
    view = draw_view(batch, drafter.config.verified_period, 0.0, torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, positions = drafter(batch, view), loss_positions(batch)
        output = replace(output, predictions=tuple(replace(p, project=exact(drafter)) for p in output.predictions))
        before = distillation_loss(output, batch, positions, drafter, LossConfig(feature=0.0, kl=1.0))
        drafter.vocabulary._packed = Zeros()
        after = distillation_loss(output, batch, positions, drafter, LossConfig(feature=0.0, kl=1.0))
    assert torch.equal(before.kl, after.kl)


def test_more_tokens_at_the_top_than_there_are_is_refused(tiny):
    drafter = build(tiny, VARIANTS["moa-0"].model_copy(update={"draft_vocab_size": 60}))
    with pytest.raises(ConfigError, match=r"losses\.kl_top_k is 60; the draft vocabulary has 60 tokens"):
        Objective(drafter, LossConfig(kl_top_k=60), TrainConfig())


def test_total_variation_gets_its_weight_late(tiny):
    drafter = build(tiny, VARIANTS["moa-0"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 40)], 5, drafter.needs)
    view = draw_view(batch, drafter.config.verified_period, 0.0, torch.Generator().manual_seed(0))
    late = LossConfig(kl=1.0, total_variation=0.5, total_variation_start_share=0.7)

    def total(losses: LossConfig, progress: float) -> float:
        objective = Objective(drafter, losses, TrainConfig())
        return float(objective(batch, replace(view, progress=progress))[0].detach())

    without, with_it = late.model_copy(update={"total_variation": 0.0}), LossConfig(kl=1.0, total_variation=0.5)
    assert total(late, 0.7) == total(without, 0.7) < total(with_it, 0.7)
    assert total(late, 0.71) == total(with_it, 0.71)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"total_variation_start_share": 0.5},
            "losses.total_variation_start_share is 0.5, but losses.total_variation is 0",
        ),
        ({"kl": 0, "total_variation": 1.0, "kl_top_k": 5}, "losses.kl_top_k is 5, but losses.kl is 0"),
        (
            {"kl": 0, "position_share": 0.5},
            "losses.position_share is 0.5, but losses.kl and losses.total_variation are 0",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


@pytest.mark.parametrize("draft_vocab_size", [None, 60])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_without_figures_loss_and_gradients_are_the_same_bits(tiny, weights, draft_vocab_size):
    drafter = build(tiny, VARIANTS["moa-0"].model_copy(update={"draft_vocab_size": draft_vocab_size})).train()
    batch = batch_of(tiny.target, [tiny.prompt(0, 40), tiny.prompt(1, 33)], 5, drafter.needs)
    view = draw_view(batch, drafter.config.verified_period, 0.0, torch.Generator().manual_seed(0))
    found: list[tuple[LossSums, list[torch.Tensor]]] = []
    for with_figures in (True, False):
        drafter.zero_grad()
        sums = distillation_loss(drafter(batch, view), batch, loss_positions(batch), drafter, weights, with_figures)
        sums.total.backward()
        found.append((sums, [p.grad.clone() for p in drafter.parameters() if p.grad is not None]))
    (full, gradients), (bare, same) = found
    assert torch.equal(full.total, bare.total)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert full.count_by_step.sum() > 0
    assert bare.count_by_step.sum() == bare.correct_by_step.sum() == 0
    assert (bare.rejection == full.rejection) if weights.total_variation else (bare.rejection == 0)
