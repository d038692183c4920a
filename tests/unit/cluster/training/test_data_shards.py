"""Lanes: one worker with three batches does what one with each does; precision and accumulation."""

import pytest
import torch
from one_step import as_data_shard, gradients_of
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build, losses_for
from tiny_targets import TinyTarget, load_target

from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, TrainConfig
from moray.distill.optim import Optimiser
from moray.distill.parallel import LossScale, Replicas
from moray.distill.step import UpdateContext, data_shards_of, run_update
from moray.errors import ConfigError

SCHEDULE = LinearSchedule(type="linear", warmup_steps=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("data_shards"), num_hidden_layers=2, hidden_size=32)


def data_shard_batches(tiny, drafter):
    lengths = (12, 40, 21)  # so that a mean of means would be another number
    return [batch_of(tiny.target, [tiny.prompt(i, length)], 4, drafter.needs) for i, length in enumerate(lengths)]


def test_every_worker_has_its_lanes():
    for workers in range(1, 6):
        shares = [list(data_shards_of(rank, workers, 5)) for rank in range(workers)]
        assert sorted(data_shard for share in shares for data_shard in share) == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("name", ["moa-0", "eagle-0", "medusa-0"])
def test_lanes_add_up_to_the_mean_over_all_positions(tiny, name):
    """Each data shard alone, weighed by its positions, gives together what all of them give at once."""
    train = TrainConfig(max_grad_norm=1e9)
    drafter = build(tiny, VARIANTS[name])
    losses = losses_for(drafter)
    batches = data_shard_batches(tiny, drafter)
    whole = gradients_of(drafter, batches, losses, train)
    metrics = whole.metrics(losses)
    gradients = {key: p.grad.clone() for key, p in drafter.named_parameters()}
    total = {key: torch.zeros_like(value) for key, value in gradients.items()}
    loss = positions = 0.0
    for data_shard, batch in enumerate(batches):
        alone = build(tiny, VARIANTS[name])
        optimiser = Optimiser(alone, AdamWConfig(type="adamw"), SCHEDULE)
        optimiser.step = lambda *_: None  # type: ignore[method-assign]
        result = run_update(
            Replicas(alone, optimiser, losses, train),
            [as_data_shard(batch, data_shard)],
            UpdateContext(0, 1, 1, 0.0, 1, 0),
        )
        own = result.metrics(losses)
        loss, positions = loss + own["loss"] * own["positions"], positions + own["positions"]
        for key, parameter in alone.named_parameters():
            total[key] += parameter.grad * own["positions"]
    assert metrics["positions"] == positions
    assert metrics["loss"] == pytest.approx(loss / positions, rel=1e-5)
    assert metrics["padding_waste"] == 0.0
    for key, value in gradients.items():
        torch.testing.assert_close(value, total[key] / positions, rtol=1e-4, atol=1e-6)


def test_figures_that_were_not_computed_are_not_reported(tiny):
    drafter = build(tiny, VARIANTS["moa-0"]).train()
    replicas = Replicas(
        drafter, Optimiser(drafter, AdamWConfig(type="adamw", lr=1e-12), SCHEDULE), LossConfig(), TrainConfig()
    )
    batch = data_shard_batches(tiny, drafter)[0]
    metrics = run_update(replicas, [as_data_shard(batch)], UpdateContext(0, 9, 9, 0.0, 1, 0)).metrics(LossConfig())
    assert 0.0 < metrics["acceptance"] < 1.0
    result = run_update(replicas, [as_data_shard(batch)], UpdateContext(0, 9, 9, 0.0, 1, 0, is_reported=False))
    with pytest.raises(AssertionError, match="were not computed"):
        result.metrics(LossConfig())


def test_a_lane_draws_the_same_whoever_computes_it(tiny):
    drafter = build(tiny, VARIANTS["moa-0"])
    batch = data_shard_batches(tiny, drafter)[1]
    replicas = Replicas(
        drafter, Optimiser(drafter, AdamWConfig(type="adamw", lr=1e-12), SCHEDULE), LossConfig(), TrainConfig()
    )
    context = UpdateContext(3, 9, 9, 0.5, 2, 0)
    together = run_update(replicas, [as_data_shard(batch, 0), as_data_shard(batch, 4)], context).data_shards
    alone = [run_update(replicas, [as_data_shard(batch, data_shard)], context).data_shards[0] for data_shard in (4, 0)]
    assert [float(data_shard.loss) for data_shard in together] == pytest.approx(
        [float(data_shard.loss) for data_shard in alone[::-1]], rel=1e-5
    )
    assert float(together[0].loss) != pytest.approx(float(together[1].loss), rel=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("float16", 0.02)])
def test_half_precision_trains_like_full(tiny, precision, tolerance):
    losses = []
    for given in ("float32", precision):
        drafter = build(tiny, VARIANTS["moa-0"]).train()
        train = TrainConfig(precision=given)
        optimiser = Optimiser(drafter, AdamWConfig(type="adamw", lr=3e-3), SCHEDULE)
        replicas = Replicas(drafter, optimiser, LossConfig(), train)
        batches = data_shard_batches(tiny, drafter)
        rows = []
        for step in range(12):
            data_shards = [as_data_shard(batch, data_shard) for data_shard, batch in enumerate(batches)]
            rows.append(
                run_update(replicas, data_shards, UpdateContext(step, 12, 12, 0.0, 3, 0)).metrics(LossConfig())["loss"]
            )
        assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
        assert rows[-1] < 0.9 * rows[0]
        losses.append(rows)
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


def test_a_gradient_too_large_for_half_precision_is_skipped_and_the_scale_halved(tiny):
    drafter = build(tiny, VARIANTS["moa-0"]).train()
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw", lr=3e-3), SCHEDULE)
    replicas = Replicas(drafter, optimiser, LossConfig(), TrainConfig(precision="float16"))
    assert replicas._scale is not None
    replicas._scale.value = 2.0**60
    before = {key: value.clone() for key, value in drafter.state_dict().items()}
    batch = data_shard_batches(tiny, drafter)[0]
    result = run_update(replicas, [as_data_shard(batch)], UpdateContext(0, 9, 9, 0.0, 1, 0))
    assert not torch.isfinite(result.grad_norm)
    assert bool(result.may_go_on)
    assert replicas._scale.value == 2.0**59
    assert all(torch.equal(before[key], value) for key, value in drafter.state_dict().items())
    assert replicas.state_dict()["loss_scale/value"] == 2.0**59
    batch.taps.hidden[-1].fill_(float("nan"))  # no scale makes a NaN loss finite
    assert not bool(run_update(replicas, [as_data_shard(batch)], UpdateContext(1, 9, 9, 0.0, 1, 0)).may_go_on)


def test_a_loss_scale_goes_to_a_checkpoint_and_back(tiny):
    scales = []
    for _ in range(2):
        drafter = build(tiny, VARIANTS["moa-0"])
        optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
        scales.append(Replicas(drafter, optimiser, LossConfig(), TrainConfig(precision="float16")))
    assert scales[0]._scale is not None
    scales[0]._scale.value, scales[0]._scale._good_steps = 8.0, 77
    scales[1].load_state_dict(scales[0].state_dict())
    assert scales[1]._scale is not None
    assert (scales[1]._scale.value, scales[1]._scale._good_steps) == (8.0, 77)


def test_a_loss_scale_grows_after_many_good_steps_and_says_when_it_is_not_to_blame():
    scale = LossScale(value=4.0, growth_steps=3)
    for is_good in (True, True, False, True, True, True):
        assert scale.adapt(is_good) == is_good
    assert scale.value == 4.0
    for _ in range(3):
        assert not scale.is_exhausted
        scale.adapt(False)
    assert scale.is_exhausted


def test_float16_is_refused_where_torch_cannot_train_with_it(tiny, monkeypatch):
    monkeypatch.setattr("moray.distill.objective._has_float16", lambda device_type: False)
    drafter = build(tiny, VARIANTS["moa-0"])
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    with pytest.raises(ConfigError, match=r"train.precision is float16, .* cannot train with on a cpu: use"):
        Replicas(drafter, optimiser, LossConfig(), TrainConfig(precision="float16"))
