"""The published recipe trains the same model: its loss of a chat is that of our own objective."""

import pytest
import torch
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target

from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.losses import distillation_loss
from moray.distill.masks import draw_view, loss_positions
from moray.errors import ConfigError
from moray.targets.spec import TargetConfig
from pipelines.benchmarks.recipe import Chat, RecipeTrainer, stock_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("recipe"))


def test_its_loss_is_that_of_our_objective_and_an_update_changes_every_weight(tiny):
    drafter = build(tiny, VARIANTS["moa-0"])
    losses = LossConfig(feature=0.3, kl=1.0)
    batch = batch_of(tiny.target, [tiny.prompt(0, 40)], 5, drafter.needs)
    view = draw_view(batch, drafter.config.verified_period, 0.0, torch.Generator().manual_seed(3))
    sums = distillation_loss(drafter(batch, view), batch, loss_positions(batch), drafter, losses)
    wanted = float(sums.total / sums.count)
    trainer = RecipeTrainer(
        stock_model(TargetConfig(model=str(tiny.folder))), drafter, losses, TrainConfig(max_grad_norm=1.0), 1e-3
    )
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    chat = Chat(batch.tokens[0], batch.response_mask[0])
    assert trainer.update([chat], torch.Generator().manual_seed(3)) == pytest.approx(wanted, rel=1e-4)
    assert all(not torch.equal(before[name], parameter) for name, parameter in drafter.named_parameters())
    assert trainer.update([chat], torch.Generator().manual_seed(3)) < wanted


def test_target_layers_are_refused(tiny):
    drafter = build(tiny, VARIANTS["moa-1"])
    with pytest.raises(ConfigError, match="is written down for target_layers=0"):
        RecipeTrainer(tiny.target.model, drafter, LossConfig(), TrainConfig(max_grad_norm=1.0))
