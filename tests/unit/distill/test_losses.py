"""Distillation losses against loops over single positions."""

import pytest
import torch
from one_step import gradients_of
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build, losses_for
from tiny_targets import TinyTarget, load_target

from moray.distill import token_losses
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.losses import distillation_loss, simulated_tau
from moray.distill.masks import loss_positions, verified_start
from moray.distill.token_losses import MAX_STEPS_AHEAD
from moray.drafters.learner import DraftOutput, DraftView, Prediction


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("losses"), num_hidden_layers=3, hidden_size=32)


@pytest.fixture(params=["moa-0", "moa-1", "dynamic-moa-0"])
def setting(request, tiny):
    """A drafter, a batch, a view, the training positions and the drafter's predictions."""
    drafter = build(tiny, VARIANTS[request.param])
    batch = batch_of(tiny.target, [tiny.prompt(0, 40), tiny.prompt(1, 31)], 5, drafter.needs)
    start = verified_start(batch.response_mask, torch.tensor([14, 5]), torch.tensor([0, 3]))
    view = DraftView(start, torch.zeros(2, dtype=torch.bool), layer_counts=drafter.layer_counts[::2])
    drafted = start != torch.arange(start.shape[1])
    return drafter, batch, view, loss_positions(batch) & drafted, drafter(batch, view)


def test_the_loss_is_that_of_every_position(setting):
    drafter, batch, view, positions, output = setting
    weights = LossConfig(feature=0.7, kl=0.3, total_variation=0.2)
    sums = distillation_loss(output, batch, loss_positions(batch), drafter, weights)
    feature, kl, rejection, count = 0.0, 0.0, 0.0, 0
    correct, counted = [0] * MAX_STEPS_AHEAD, [0] * MAX_STEPS_AHEAD
    for row, i in positions.nonzero().tolist():
        count += 1
        for depth, (predicted, scale, weight) in output.features.items():
            gap = ((predicted[row, i] - batch.taps.hidden[depth][row, i]) / scale).abs()
            smooth = torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5)
            share = weight[row] if isinstance(weight, torch.Tensor) else weight
            feature += float(share * smooth.mean().detach())
        p = drafter.head.logits(batch.taps.hidden[-1][row, i]).double().softmax(-1)
        q = drafter.head.logits(output.predictions[0].hidden[row, i]).double().softmax(-1)
        kl += float((p * (p / q).log()).sum().detach())
        rejection += 1.0 - float(torch.minimum(p, q).sum().detach())
        ahead = i - int(view.start[row, i])
        if ahead <= MAX_STEPS_AHEAD:
            counted[ahead - 1] += 1
            correct[ahead - 1] += int(p.argmax() == q.argmax())
    assert int(sums.count) == count > 30
    assert float(sums.feature) == pytest.approx(feature, rel=1e-4)
    assert float(sums.kl) == pytest.approx(kl, rel=1e-4)
    assert float(sums.rejection) == pytest.approx(rejection, rel=1e-4)
    assert float(sums.total.detach()) == pytest.approx(0.7 * feature + 0.3 * kl + 0.2 * rejection, rel=1e-4)
    assert sums.count_by_step.tolist() == counted
    assert sums.correct_by_step.tolist() == correct
    assert sum(counted) < count, "steps beyond the last reported one are trained but not reported"


def test_chunks_of_logits_change_nothing(setting, monkeypatch):
    drafter, batch, _, positions, output = setting

    def loss_and_gradient():
        sums = distillation_loss(output, batch, positions, drafter, LossConfig())
        (gradient,) = torch.autograd.grad(sums.total, output.predictions[0].hidden, retain_graph=True)
        return sums, gradient

    whole, gradient = loss_and_gradient()
    monkeypatch.setattr(token_losses, "_MAX_CHUNK", 7)
    chunked, chunked_gradient = loss_and_gradient()
    torch.testing.assert_close(chunked.total, whole.total)
    torch.testing.assert_close(chunked_gradient, gradient)
    assert torch.equal(chunked.correct_by_step, whole.correct_by_step)


def test_a_perfect_prediction_costs_nothing_and_is_always_right(setting):
    drafter, batch, view, positions, output = setting
    perfect = DraftOutput(
        (Prediction(batch.taps.hidden[-1], view.start, drafter.vocabulary.logits),),
        {depth: given._replace(predicted=batch.taps.hidden[depth]) for depth, given in output.features.items()},
    )
    sums = distillation_loss(perfect, batch, positions, drafter, LossConfig())
    assert float(sums.total) == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(sums.correct_by_step, sums.count_by_step)


def test_gradients_come_from_training_positions_only(setting):
    drafter, batch, _, positions, output = setting
    sums = distillation_loss(output, batch, positions, drafter, LossConfig())
    (gradient,) = torch.autograd.grad(sums.total, output.predictions[0].hidden, retain_graph=True)
    assert torch.equal(gradient.abs().sum(dim=-1) > 0, positions)


def test_no_training_position_is_no_loss_and_no_crash(setting):
    drafter, batch, _, positions, output = setting
    sums = distillation_loss(output, batch, torch.zeros_like(positions), drafter, LossConfig())
    assert sums.total.item() == 0.0
    assert int(sums.count) == 0


def test_a_batch_that_is_repeated_counts_twice_and_steps_the_same(tiny):
    """Losses are per position: twice the data is the same step, not twice the step."""

    gradients = []
    for copies in (1, 2):
        drafter = build(tiny, VARIANTS["moa-0"])
        batch = batch_of(tiny.target, [tiny.prompt(0, 20)] * copies, 5, drafter.needs)
        result = gradients_of(drafter, [batch], LossConfig(), TrainConfig(max_grad_norm=1e9), seed=1)
        metrics = result.metrics(LossConfig())
        assert metrics["loss"] == pytest.approx(metrics["feature_loss"] + 0.1 * metrics["kl"], rel=1e-5)
        gradients.append((metrics["positions"], float(result.grad_norm)))
    assert gradients[1][0] == pytest.approx(2 * gradients[0][0], abs=2)  # each copy draws its own phase
    assert gradients[1][1] == pytest.approx(gradients[0][1], rel=0.3)


@pytest.mark.parametrize(
    ("accuracy", "tau"), [([], 1.0), ([1.0], 2.0), ([0.5, 0.5], 1.75), ([0.0, 1.0], 1.0), ([1.0] * 8, 9.0)]
)
def test_simulated_tau_by_hand(accuracy, tau):
    assert simulated_tau(accuracy) == pytest.approx(tau)


@pytest.mark.parametrize("name", ["moa-0", "eagle-0", "glide-0", "medusa-0", "medusa-1", "independent-0"])
def test_a_batch_without_a_position_to_train_on_has_gradients_of_zero(tiny, name):
    """Else a worker with such a batch dies, or waits for ever for the others."""
    drafter = build(tiny, VARIANTS[name])
    batch = batch_of(tiny.target, [tiny.prompt(0, 12)], 12, drafter.needs)
    result = gradients_of(drafter, [batch], losses_for(drafter))
    assert float(result.grad_norm) == 0.0
    assert all(p.grad is not None for p in drafter.parameters() if p.ndim > 1)
