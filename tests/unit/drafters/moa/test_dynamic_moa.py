"""MoA for several N: but for its shift and map, each is the function of a MoA of that N alone."""

import pytest
import torch
from reference import scrambled
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.batch import TapNeeds, Taps
from moray.distill.configs import LossConfig
from moray.distill.losses import distillation_loss
from moray.distill.masks import draw_view, loss_positions, verified_start
from moray.drafters.base import TAIL
from moray.drafters.configs import DRAFTER_CONFIG
from moray.drafters.learner import DraftView
from moray.drafters.moa.dynamic_moa import DynamicMoA
from moray.errors import ConfigError

EFFORTS = (0, 1, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("dynamic"), num_hidden_layers=4)


@pytest.fixture
def drafter(tiny) -> DynamicMoA:
    drafter = scrambled(build(tiny, VARIANTS["dynamic-moa-0"]))
    assert isinstance(drafter, DynamicMoA)
    return drafter


@pytest.fixture
def batch(tiny, drafter):
    texts = [tiny.prompt(seed, length) for seed, length in ((0, 24), (1, 19), (2, 22))]
    return batch_of(tiny.target, texts, 6, drafter.needs)


def view_of(batch, layer_counts: tuple[int, ...] | None) -> DraftView:
    size = batch.tokens.shape[0]
    start = verified_start(batch.response_mask, torch.full((size,), 5), torch.full((size,), 1))
    return DraftView(start, None, layer_counts=layer_counts)


def test_it_reads_every_depth_that_it_predicts(drafter):
    assert drafter.needs == TapNeeds((0, 1, 2, 3), (-1, -2, -3))
    assert drafter.observed.hidden_depths == ()


def test_of_its_own_an_n_has_a_shift_and_a_map(tiny, drafter):
    alone, width = build(tiny, VARIANTS["moa-2"]), drafter.spec.hidden_size
    assert drafter.num_parameters - alone.num_parameters == len(EFFORTS) * width * (width + 1)


@pytest.mark.parametrize("num_target_layers", EFFORTS)
def test_an_n_without_shift_and_map_is_moa_of_that_n(tiny, drafter, batch, num_target_layers):
    with torch.no_grad():
        drafter.shift.zero_()
        drafter.to_depth.copy_(torch.eye(drafter.spec.hidden_size))
    alone = build(tiny, VARIANTS[f"moa-{num_target_layers}"].model_copy(update={"layer_stride": 1}))
    own = {name: tensor for name, tensor in drafter.state_dict().items() if name not in ("shift", "to_depth")}
    alone.load_state_dict(own | {"feature_scale": drafter.feature_scale[num_target_layers]})
    weights, positions = LossConfig(feature=0.7, kl=0.3), loss_positions(batch)
    with torch.no_grad():
        ours, theirs = (each(batch, view_of(batch, (num_target_layers,) * 3)) for each in (drafter, alone))
        losses = [distillation_loss(output, batch, positions, drafter, weights) for output in (ours, theirs)]
    torch.testing.assert_close(ours.predictions[0].hidden, theirs.predictions[0].hidden)
    torch.testing.assert_close(losses[0].feature, losses[1].feature)
    torch.testing.assert_close(losses[0].total, losses[1].total)


def test_sequences_of_one_batch_do_not_mix(drafter, batch):
    """Each sequence as in a batch of its own N, whatever its neighbours' are; so are loss and gradient."""
    weights = LossConfig(feature=1.0, kl=0.5)

    def run(layer_counts: tuple[int, ...], rows: list[int]):
        output = drafter(batch, view_of(batch, layer_counts))
        positions = loss_positions(batch)
        positions[[row for row in range(3) if row not in rows]] = False
        loss = distillation_loss(output, batch, positions, drafter, weights).total
        return output.predictions[0].hidden, loss, torch.autograd.grad(loss, list(drafter.parameters()))

    mixed, total, gradients = run((2, 0, 1), [0, 1, 2])
    apart = [run((num_target_layers,) * 3, [row]) for row, num_target_layers in enumerate((2, 0, 1))]
    for row, (hidden, _, _) in enumerate(apart):
        torch.testing.assert_close(mixed[row], hidden[row])
    torch.testing.assert_close(total, sum(loss for _, loss, _ in apart))
    for together, *alone in zip(gradients, *(own for _, _, own in apart), strict=True):
        torch.testing.assert_close(together, sum(alone), rtol=1e-3, atol=1e-4)


def test_without_a_draw_the_first_n_trains(drafter, batch):
    with torch.no_grad():
        drawn, free = (
            drafter(batch, view_of(batch, layer_counts)).predictions[0].hidden for layer_counts in ((0, 0, 0), None)
        )
        assert torch.equal(drawn, free)
        drafter.fix_num_target_layers(2)
        fixed, deep = (
            drafter(batch, view_of(batch, layer_counts)).predictions[0].hidden for layer_counts in (None, (2, 2, 2))
        )
    assert torch.equal(fixed, deep)


def test_a_fixed_n_keeps_no_more_of_the_target_than_it_runs(drafter, batch):
    taps, widths, layers = batch.taps, [], []
    for num_target_layers in EFFORTS:
        drafter.fix_num_target_layers(num_target_layers)
        tail = drafter.observe(taps).get("tail")
        widths.append(0 if tail is None else tail.shape[2])
        state = drafter.new_state(8, 4)
        layers.append(0 if state.tail is None else state.tail.data.shape[0])
    assert layers == [0, 1, 2]
    assert widths == [num_target_layers * drafter.spec.kv_width for num_target_layers in EFFORTS]
    assert len(drafter.step_weights()) > 0


def test_an_n_that_was_not_trained_is_refused(tiny, drafter):
    with pytest.raises(ConfigError, match=r"num_target_layers is 3, but this drafter drafts with 0, 1, 2 target"):
        drafter.fix_num_target_layers(3)
    with pytest.raises(ConfigError, match=r"num_target_layers is 0, but this drafter drafts with 1 target"):
        build(tiny, VARIANTS["moa-1"]).fix_num_target_layers(0)


@pytest.mark.parametrize("layers", [[1, 0], [0, 0, 1], [1], [-1, 0]])
def test_target_layers_ascend_and_are_several(layers):
    values = VARIANTS["dynamic-moa-0"].model_dump() | {"target_layers": tuple(layers)}
    with pytest.raises(ValueError, match="target_layers"):
        DRAFTER_CONFIG.validate_python(values)


def test_draws_are_as_even_as_a_batch_allows(drafter, batch):
    generator = torch.Generator().manual_seed(0)
    seen = [0, 0, 0]
    for _ in range(60):
        drawn = draw_view(batch, (3, 6), 0.0, generator, EFFORTS).layer_counts
        assert drawn is not None
        assert sorted(drawn) == [0, 1, 2]
        seen[drawn[0]] += 1
    assert min(seen) > 8, "any sequence may have any N"
    plain, more = (draw_view(batch, (3, 6), 0.5, torch.Generator().manual_seed(1), e) for e in ((1,), EFFORTS))
    assert plain.layer_counts is None
    assert torch.equal(plain.start, more.start), "drafters of one N draw what they always drew"
    assert plain.seed == more.seed


@pytest.mark.parametrize("num_target_layers", [1, 2])
def test_the_last_layers_may_come_later_than_the_rest_of_the_memory(drafter, batch, num_target_layers):
    text, taps = batch.tokens[0], batch.taps
    whole, parts = drafter.new_state(64, 8), drafter.new_state(64, 8)
    memory = drafter.observe(Taps(taps.kv[:1, :12], {}))
    without = {name: rows for name, rows in memory.items() if name != TAIL}
    with torch.no_grad():
        drafter.extend(whole, text[:12], memory)
        drafter.extend(parts, text[:7], {name: rows[:, :7] for name, rows in without.items()})
        for state in (whole, parts):
            drafter.set_num_target_layers(state, 0)
        drafter.step(parts, text[7:8], None, 0)  # a draft without them in between
        drafter.extend(parts, text[7:12], {name: rows[:, 7:] for name, rows in without.items()}, 1)
        found, wanted = (drafter.step(state, text[12:13], None, 0) for state in (parts, whole))
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0)
        for layer in range(1, num_target_layers + 1):
            for begin, end in ((0, 5), (5, 12)):
                drafter.recall(parts, begin, layer, taps.kv[:1, begin:end, -layer])
        for state in (whole, parts):
            drafter.set_num_target_layers(state, num_target_layers)
        found, wanted = (drafter.step(state, text[12:13], None, 0) for state in (parts, whole))
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0)
        drafter.recall(parts, 0, 1, taps.kv[:1, :12, -1] + 1)
        assert not torch.allclose(drafter.step(parts, text[12:13], None, 0), wanted, atol=1e-2)
