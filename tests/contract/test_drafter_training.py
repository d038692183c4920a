"""Training a drafter: shapes, gradients in the drafter alone, and losses that fall."""

import pytest
import torch
from drafting import PROMPT, state_at, view_of
from one_step import as_data_shard, gradients_of
from tiny_batches import batch_of
from tiny_drafters import UNTRAINED, VARIANTS, build, losses_for

from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, TrainConfig
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.distill.step import UpdateContext, run_update
from moray.errors import ConfigError


def test_shapes_and_finiteness(trained, trained_batch):
    drafter, batch = trained, trained_batch
    output = drafter(batch, view_of(batch, drafter))
    assert set(output.features) <= set(drafter.needs.hidden_depths)
    for feature, scale, _ in output.features.values():
        assert feature.shape == (*batch.tokens.shape, drafter.spec.hidden_size)
        assert scale > 0
    for prediction in output.predictions:
        assert prediction.hidden.shape[:2] == prediction.start.shape == batch.tokens.shape
        assert torch.isfinite(prediction.hidden).all()
        assert prediction.score(prediction.hidden[0]).shape == (batch.tokens.shape[1], drafter.vocabulary.size)
    state = state_at(drafter, batch.tokens, batch.taps, 5)
    assert drafter.step(state, torch.tensor([4]), None, 0).shape == (1, drafter.spec.vocab_size)
    siblings = torch.cat([torch.ones(3, 1, dtype=torch.bool), torch.eye(3, dtype=torch.bool)], dim=1)
    logits = drafter.step(state, torch.tensor([1, 2, 3]), siblings, 1)
    assert logits.shape == (3, drafter.spec.vocab_size)


def test_gradients_reach_every_weight_and_none_of_the_target_s(tiny, trained, trained_batch):
    drafter = trained.train()
    result = gradients_of(drafter, [trained_batch], losses_for(drafter), TrainConfig(max_grad_norm=1e9), 0.5)
    assert float(result.grad_norm) > 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
    model = tiny("llama").target.model
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("term", ["feature", "kl", "total_variation"])
def test_every_loss_is_lowered_by_training_on_it(tiny, trained, trained_batch, term):
    losses = LossConfig(**({"feature": 0.0, "kl": 0.0} | {term: 1.0}))
    if term == "feature" and not trained.config.predicts_features:
        output = trained(trained_batch, view_of(trained_batch, trained))
        assert output.features == {}
        return
    optimiser = Optimiser(trained, AdamWConfig(type="adamw", lr=3e-3), LinearSchedule(type="linear", warmup_steps=1))
    replicas = Replicas(trained, optimiser, losses, TrainConfig())
    context = UpdateContext(0, 25, 50, staircase_probability=0.0, num_rounds=1, seed=0)  # always the same draws
    values = [run_update(replicas, [as_data_shard(trained_batch)], context).metrics(losses)["loss"] for _ in range(25)]
    assert values[-1] < 0.9 * values[0]


def test_nothing_to_train_is_said_clearly(tiny, variant):
    drafter = build(tiny("llama"), VARIANTS[variant])
    assert (drafter.num_parameters == 0) == variant.startswith(UNTRAINED)
    if variant.startswith(UNTRAINED):
        batch = batch_of(tiny("llama").target, [tiny("llama").prompt(0, 24)], PROMPT, drafter.needs)
        with pytest.raises(ConfigError, match="nothing to train: evaluate it"):
            drafter(batch, view_of(batch, drafter))
