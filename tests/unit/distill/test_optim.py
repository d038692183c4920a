"""Optimisers resume to the bit, and schedules give the published rates."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from moray.distill.configs import AdamWConfig, LinearSchedule, MuonConfig, SpikeSchedule
from moray.distill.optim import Optimiser
from moray.errors import DataError

CONFIGS = [AdamWConfig(type="adamw", lr=1e-2, weight_decay=0.1), MuonConfig(type="muon", weight_decay=0.1)]
LINEAR = LinearSchedule(type="linear", warmup_steps=4, min_lr_ratio=0.1)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 5, bias=False))


def step(model: nn.Module, optimiser: Optimiser, number: int) -> None:
    data = torch.randn(7, 6, generator=torch.Generator().manual_seed(number))
    model(data).square().sum().backward()
    optimiser.step(number, 10, 20)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_a_restored_optimiser_takes_the_very_same_steps(config):
    model = module()
    optimiser = Optimiser(model, config, LINEAR)
    for number in range(3):
        step(model, optimiser, number)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in optimiser.state_dict().items()}
    for number in range(3, 6):
        step(model, optimiser, number)

    other = module()
    other.load_state_dict(weights)
    restored = Optimiser(other, config, LINEAR)
    restored.load_state_dict(state)
    for number in range(3, 6):
        step(other, restored, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert restored.learning_rate == optimiser.learning_rate

    forgetful = module()
    forgetful.load_state_dict(weights)
    fresh = Optimiser(forgetful, config, LINEAR)
    for number in range(3, 6):
        step(forgetful, fresh, number)
    differing = [not torch.equal(a, b) for a, b in zip(model.parameters(), forgetful.parameters(), strict=True)]
    assert all(differing), "the state matters for every parameter"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_every_parameter_moves_and_gradients_are_cleared(config):
    model = module()
    before = [parameter.clone() for parameter in model.parameters()]
    step(model, Optimiser(model, config, LINEAR), 0)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, parameter)
        assert parameter.grad is None


def test_muon_takes_matrices_and_adamw_the_rest():
    model = module()
    optimiser = Optimiser(model, CONFIGS[1], LINEAR)
    step(model, optimiser, 0)
    kinds = {name: {key.rpartition("/")[2] for key in optimiser.state_dict() if key.startswith(name)} for name in "012"}
    assert "momentum_buffer" in {key.rpartition("/")[2] for key in optimiser.state_dict() if key.startswith("0.weight")}
    assert "exp_avg" in {key.rpartition("/")[2] for key in optimiser.state_dict() if key.startswith("0.bias")}
    assert "momentum_buffer" not in kinds["1"]
    assert "exp_avg" not in kinds["2"]


def test_frozen_parameters_stay_out():
    model = module()
    model[0].weight.requires_grad_(False)
    optimiser = Optimiser(model, CONFIGS[0], LINEAR)
    before = model[0].weight.clone()
    step(model, optimiser, 0)
    assert torch.equal(model[0].weight, before)
    assert not any(name.startswith("0.weight") for name in optimiser.state_dict())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_a_foreign_state_is_refused_by_name(config):
    with pytest.raises(DataError, match=r"'5\.weight/exp_avg' belongs to no parameter"):
        Optimiser(module(), config, LINEAR).load_state_dict({"5.weight/exp_avg": torch.zeros(2)})


def test_the_linear_schedule():
    factors = [LINEAR.factor(number, 10, 20) for number in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[12] == pytest.approx(0.55)  # half of the way from 1 to 0.1
    assert LINEAR.factor(20, 10, 20) == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(factors[4:]))


def test_the_published_schedule():
    """50 steps up to 20x, down to 1x at the end of the first epoch, then constant."""
    schedule = SpikeSchedule(type="spike")
    assert schedule.factor(0, 1000, 40000) == pytest.approx(20 / 50)
    assert schedule.factor(49, 1000, 40000) == pytest.approx(20.0)
    assert schedule.factor(50, 1000, 40000) == pytest.approx(20.0)
    assert schedule.factor(525, 1000, 40000) == pytest.approx(10.5)
    assert [schedule.factor(number, 1000, 40000) for number in (1000, 1001, 39999)] == [1.0] * 3
    assert schedule.factor(60, 40, 400) == 1.0, "an epoch shorter than the warm-up"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_the_schedule_scales_every_base_rate(config):
    model = module()
    optimiser = Optimiser(model, config, LINEAR)
    for number, factor in ((0, 0.25), (3, 1.0), (12, 0.55)):
        step(model, optimiser, number)
        rates = [group["lr"] for inner in optimiser._optimisers for group in inner.param_groups]
        bases = [config.lr] if config.type == "adamw" else [config.lr, config.vector_lr]
        assert rates == pytest.approx([base * factor for base in bases])
        assert optimiser.learning_rate == pytest.approx(config.lr * factor)
