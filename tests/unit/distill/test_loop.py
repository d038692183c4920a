"""The training loop: resumes to the bit, reports and saves when it should, draws anew in every step."""

import json
import re

import pytest
import torch
from one_step import as_data_shard
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.distill.checkpoint import load_training, save_training
from moray.distill.configs import AdamWConfig, LinearSchedule, LossConfig, MuonConfig, TrainConfig
from moray.distill.finite import NONFINITE_FILE, FiniteWatch, NonFiniteError, write_record
from moray.distill.loop import Progress, Span, train
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.distill.step import UpdateContext, run_update
from moray.drafters.checkpoint import load_drafter, save_drafter
from moray.errors import DataError

SCHEDULE = LinearSchedule(type="linear", warmup_steps=3)
STEPS = 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("loop"), num_hidden_layers=2, hidden_size=32)


@pytest.fixture(scope="module")
def batches(tiny):
    needs = build(tiny, VARIANTS["moa-1"]).needs
    return [batch_of(tiny.target, [tiny.prompt(2 * i, 24), tiny.prompt(2 * i + 1, 15)], 4, needs) for i in range(STEPS)]


def run(drafter, optimiser, batches, first_step: int, config: TrainConfig, total: int = STEPS):
    """Train and return what was reported and when it was saved."""
    reports: list[tuple[int, dict[str, float]]] = []
    saves: list[int] = []
    span = Span(first=Progress(first_step, tokens=100), total_steps=total, steps_per_epoch=3, epochs=4)
    train(
        Replicas(drafter, optimiser, LossConfig(), config),
        ([as_data_shard(batch)] for batch in batches),
        span,
        LossConfig(),
        config,
        lambda progress, metrics: reports.append((progress.step, _repeatable(metrics))),
        lambda progress: saves.append(progress.step),
    )
    return reports, saves


def _repeatable(metrics: dict[str, float]) -> dict[str, float]:
    assert metrics["peak_memory_bytes"] > 1e7
    return {name: value for name, value in metrics.items() if name != "peak_memory_bytes"}


@pytest.mark.parametrize(
    "optim", [AdamWConfig(type="adamw", lr=1e-2), MuonConfig(type="muon")], ids=lambda optim: optim.type
)
def test_five_steps_a_checkpoint_and_five_more_are_ten(tiny, batches, optim, tmp_path):
    config = TrainConfig(logging_steps=1, save_steps=5)
    whole = build(tiny, VARIANTS["moa-1"])
    reports, saves = run(whole, Optimiser(whole, optim, SCHEDULE), batches, 0, config)
    assert saves == [5, 10]

    first = build(tiny, VARIANTS["moa-1"])
    optimiser = Optimiser(first, optim, SCHEDULE)
    first_reports, _ = run(first, optimiser, batches[:5], 0, config)
    save_drafter(tmp_path, first, "text")
    save_training(tmp_path, optimiser.state_dict(), Progress(5, tokens=7, seconds=1.5))

    second = load_drafter(tmp_path, first.head, "text")
    resumed = Optimiser(second, optim, SCHEDULE)
    assert load_training(tmp_path, resumed) == Progress(5, tokens=7, seconds=1.5)
    second_reports, _ = run(second, resumed, batches[5:], 5, config)

    assert first_reports + second_reports == reports
    for (name, a), (_, b) in zip(whole.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert len({report["loss"] for _, report in reports}) == STEPS


def test_a_run_depends_on_its_seed_and_on_nothing_around_it(tiny, batches):
    losses = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)  # the global generator must not matter after initialisation
        drafter = build(tiny, VARIANTS["moa-0"])
        torch.manual_seed(noise)
        optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
        reports, _ = run(drafter, optimiser, batches[:3], 0, TrainConfig(logging_steps=1, seed=seed))
        losses.append([metrics["loss"] for _, metrics in reports])
    assert losses[0] == losses[1] != losses[2]


def test_every_step_draws_its_own_view(tiny, batches):
    """The same batch three times, no learning: the loss differs because the verified positions do."""
    drafter = build(tiny, VARIANTS["moa-0"])
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw", lr=1e-12), SCHEDULE)
    reports, _ = run(drafter, optimiser, [batches[0]] * 3, 0, TrainConfig(logging_steps=1))
    assert len({round(metrics["loss"], 5) for _, metrics in reports}) == 3


def test_reports_and_saves_come_at_their_steps_and_at_the_end(tiny, batches):
    drafter = build(tiny, VARIANTS["moa-0"])
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    reports, saves = run(drafter, optimiser, batches[:7], 0, TrainConfig(logging_steps=3, save_steps=4), total=7)
    assert [step for step, _ in reports] == [3, 4, 6, 7]
    assert saves == [4, 7]
    assert not drafter.training
    for _, metrics in reports:
        assert metrics["learning_rate"] > 0
        assert 1.0 <= metrics["simulated_tau"] <= 9.0
        assert 0.0 <= metrics["accuracy"] <= 1.0


def test_total_variation_gets_its_weight_after_its_share_of_the_updates(tiny, batches):
    drafter = build(tiny, VARIANTS["moa-0"])
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    losses = LossConfig(feature=0.0, kl=1.0, total_variation=3.0, total_variation_start_share=0.5)
    reports: list[dict[str, float]] = []
    config, span = TrainConfig(logging_steps=1), Span(Progress(), total_steps=4, steps_per_epoch=4, epochs=1)
    updates = ([as_data_shard(batch)] for batch in batches[:4])
    train(
        Replicas(drafter, optimiser, losses, config),
        updates,
        span,
        losses,
        config,
        lambda _, metrics: reports.append(metrics),
        lambda _: None,
    )
    extra = [round(metrics["loss"] - metrics["kl"], 4) for metrics in reports]
    assert extra == [0, 0, *(round(3.0 * (1 - metrics["acceptance"]), 4) for metrics in reports[2:])]
    assert min(extra[2:]) > 0.1


def test_tokens_and_seconds_add_up_over_resumptions(tiny, batches):
    drafter = build(tiny, VARIANTS["moa-0"])
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    seen: list[Progress] = []
    span = Span(first=Progress(2, tokens=1000, seconds=50.0), total_steps=5, steps_per_epoch=3, epochs=4)
    config = TrainConfig(logging_steps=1, save_steps=3)
    replicas = Replicas(drafter, optimiser, LossConfig(), config)
    updates = ([as_data_shard(batch)] for batch in batches[:3])
    train(replicas, updates, span, LossConfig(), config, lambda p, _: seen.append(p), seen.append)
    each = 24 + 15  # padding does not count
    assert [(p.step, p.tokens) for p in seen] == [(3, 1000 + each)] * 2 + [(4, 1000 + 2 * each)] + [
        (5, 1000 + 3 * each)
    ] * 2
    assert 50.0 < seen[0].seconds <= seen[-1].seconds < 100.0


@pytest.mark.parametrize("bad_step", [0, 3, STEPS - 1])
def test_training_stops_before_anything_of_a_loss_that_is_not_finite_is_reported_or_saved(tiny, batches, bad_step):
    drafter = build(tiny, VARIANTS["moa-1"])
    broken = batch_of(tiny.target, [tiny.prompt(0, 24)], 4, drafter.needs)
    broken.taps.hidden[-1].fill_(float("inf"))
    given = [broken if step == bad_step else batch for step, batch in enumerate(batches)]
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    seen: list[int] = []
    with pytest.raises(NonFiniteError) as caught:
        train(
            Replicas(drafter, optimiser, LossConfig(), TrainConfig()),
            ([as_data_shard(batch, uid=f"u{step}")] for step, batch in enumerate(given)),
            Span(first=Progress(), total_steps=STEPS, steps_per_epoch=3, epochs=4),
            LossConfig(),
            TrainConfig(logging_steps=1, save_steps=1),
            lambda progress, _: seen.append(progress.step),
            lambda progress: seen.append(progress.step),
        )
    assert max(seen, default=0) == bad_step
    message = (
        rf"^update {bad_step + 1}: the loss of data shard 0 is (inf|nan); its chats are u{bad_step}-0-0 \(all of them "
    )
    assert re.search(message, str(caught.value))
    record = caught.value.record
    assert record["update"] == bad_step + 1
    assert record["learning_rate"] > 0
    assert [data_shard["uids"] for data_shard in record["data_shards"]] == [[f"u{bad_step}-0-0"]]


def test_an_infinite_loss_with_a_finite_gradient_stops_training_too(tiny, batches):
    """Smooth L1's gradient is a sign, also at infinity."""
    drafter = build(tiny, VARIANTS["moa-1"])
    batch = batch_of(tiny.target, [tiny.prompt(0, 24)], 4, drafter.needs)
    batch.taps.hidden[-2].fill_(float("inf"))
    replicas = Replicas(drafter, Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE), LossConfig(), TrainConfig())
    watch = FiniteWatch()
    watch.follow(1, run_update(replicas, [as_data_shard(batch)], UpdateContext(0, 3, 10, 0.0, 1, 0)), 0.5)
    with pytest.raises(NonFiniteError, match="the loss of data shard 0 is inf"):
        watch.check()


def test_a_gradient_that_is_not_finite_by_itself_names_all_lanes_and_is_written_down(tiny, batches, tmp_path):
    """As where a weight overflows going back: no loss tells whose fault it is."""
    drafter = build(tiny, VARIANTS["moa-1"])
    weight = next(drafter.parameters())
    weight.register_hook(lambda gradient: gradient * float("nan"))
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    replicas = Replicas(drafter, optimiser, LossConfig(), TrainConfig())
    data_shards = [as_data_shard(batches[data_shard], data_shard) for data_shard in range(3)]
    watch = FiniteWatch()
    watch.follow(7, run_update(replicas, data_shards, UpdateContext(6, 3, 10, 0.0, 3, 0)), 0.5)
    assert data_shards == [], "taps of data shards that had their turn must not be kept"
    with pytest.raises(NonFiniteError, match="update 7: the gradient is nan though every loss is finite") as caught:
        watch.check()
    watch.check()  # said once
    write_record(tmp_path, caught.value.record)
    record = json.loads((tmp_path / NONFINITE_FILE).read_text())
    assert (record["update"], record["grad_norm"], record["learning_rate"]) == (7, "NaN", 0.5)
    assert [data_shard["data_shard"] for data_shard in record["data_shards"]] == [0, 1, 2]
    assert all(data_shard["loss"] > 0 and len(data_shard["uids"]) == 2 for data_shard in record["data_shards"])


def test_a_damaged_checkpoint_is_refused_by_name(tiny, tmp_path):
    drafter = build(tiny, VARIANTS["moa-0"])
    optimiser = Optimiser(drafter, AdamWConfig(type="adamw"), SCHEDULE)
    with pytest.raises(DataError, match="cannot be resumed"):
        load_training(tmp_path, optimiser)
    save_training(tmp_path, optimiser.state_dict(), Progress(3))
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(DataError, match=str(tmp_path)):
        load_training(tmp_path, optimiser)
