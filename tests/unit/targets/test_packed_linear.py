"""Packed linear layers: torch's results to rounding, plain weights where they are asked for, chosen by measurement."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_targets import load_target
from torch import nn

from moray.config import run_command
from moray.targets import model as target_model
from moray.targets import packed_linear
from moray.targets.packed_linear import (
    Kernels,
    PackedLinear,
    PackedWeight,
    choose_kernels,
    linear_weights,
    pack_linears,
    stock_kernels,
)

PACKED = Kernels(1, "for a test")
OUTPUTS, INPUTS = 48, 32
NEEDS_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no instructions that oneDNN wants for bf16"
)


def packed_model(dtype: torch.dtype = torch.float32, kernels: Kernels = PACKED) -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.SiLU())
    model = nn.Sequential(inner, nn.Linear(OUTPUTS, INPUTS, bias=False)).to(dtype).requires_grad_(False)
    pack_linears(model, kernels)
    return model


def plainly(model: Any, x: torch.Tensor) -> torch.Tensor:
    (first, _), second = model[0], model[1]
    return F.linear(F.silu(F.linear(x, first.weight, first.bias)), second.weight)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_BF16)])
@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (5,), (3, 17), (0,)])
@torch.inference_mode()
def test_results_are_those_of_plain_weights(shape, dtype):
    model = packed_model(dtype)
    assert [type(module) for module in (model[0][0], model[1])] == [PackedLinear] * 2
    x = torch.randn(*shape, INPUTS).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(model(x), plainly(model, x), atol=tolerance, rtol=tolerance)
    sliced = torch.randn(*shape, 2 * INPUTS).to(dtype)[..., ::2]
    torch.testing.assert_close(model(sliced), plainly(model, sliced), atol=tolerance, rtol=tolerance)


@NEEDS_BF16
@pytest.mark.parametrize("rows", [1, 5])
@torch.inference_mode()
def test_rounded_weights_give_nearly_the_same_in_the_inputs_number_format(rows):
    model = packed_model(kernels=Kernels(1, "", torch.bfloat16))
    x = torch.randn(rows, INPUTS)
    found, wanted = model(x), plainly(model, x)
    assert found.dtype == torch.float32
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)


def test_parameters_keep_their_names_and_plain_weights_are_used_where_asked(monkeypatch):
    model = packed_model()
    assert set(model.state_dict()) == {"0.0.weight", "0.0.bias", "1.weight"}
    used: list[int] = []
    monkeypatch.setattr(
        packed_linear, "_packed_linear", lambda x, packed, bias: used.append(1) or x.new_zeros(*x.shape[:-1], INPUTS)
    )
    x = torch.randn(2, OUTPUTS)
    model[1](x)  # gradients could be asked for
    with torch.inference_mode():
        with stock_kernels():
            model[1](x)
        assert not used
        model[1](x)
        assert used
        used.clear()
        several = packed_model(kernels=Kernels(2, ""))
        several[1](x[:1])
        assert not used
        several[1](x)
        assert used
        used.clear()
        never = PackedWeight(several[1].weight, Kernels(None, ""))
        assert torch.equal(never.linear(x), F.linear(x, several[1].weight))
        assert not used


@torch.inference_mode()
def test_a_weight_that_is_replaced_is_the_one_that_counts():
    layer = packed_model()[1]
    layer.weight = nn.Parameter(torch.ones(3, OUTPUTS), requires_grad=False)
    assert torch.equal(layer(torch.ones(2, OUTPUTS)), torch.full((2, 3), float(OUTPUTS)))


def taking(seconds: list[float]) -> Callable[..., list[float]]:
    """In place of `_seconds`: runs the products once, whose results must be equal but for rounding, and gives these
    times."""
    given = iter(seconds)

    def run_once(*runs: Sequence[Callable[[], torch.Tensor]]) -> list[float]:
        first, second = ([product() for product in run] for run in runs)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a.float(), b.float(), atol=0.5, rtol=0.05)
        return [next(given) for _ in runs]

    return run_once


def test_the_choice_is_measured_and_told(monkeypatch):
    large = [torch.randn(2048, 1024) for _ in range(3)]
    assert choose_kernels(linear_weights(packed_model())) == Kernels(None, "")
    assert "number format" in choose_kernels([one.half() for one in 2 * large]).reason
    monkeypatch.setattr(packed_linear, "_free_bytes", lambda: 1 << 20)
    assert "copies of them take 24 MiB, more than half of the 1 MiB" in choose_kernels(large).reason
    monkeypatch.undo()
    for gains, expected in (
        ((2.0, 2.0, 2.0, 2.0), 1),
        ((1.0, 2.0, 2.0, 2.0), 2),
        ((0.7, 0.7, 1.1, 1.1), 4),
        ((0.7, 0.7, 1.04, 1.1), 17),
        ((2.0, 2.0, 1.0, 0.96), 1),
        ((2.0, 2.0, 2.0, 0.95), None),
        ((1.04, 1.04, 1.04, 1.04), None),
    ):
        monkeypatch.setattr(packed_linear, "_seconds", taking([figure for gain in gains for figure in (gain, 1.0)]))
        found = choose_kernels(large)
        assert (found.packed_from, found.dtype) == (expected, None)
        figures = ", ".join([r"\d\.\d\d"] * 3)
        assert re.search(rf"(be|are) {figures} and \d\.\d\d times as fast with 1, 2, 4 and 17 rows", found.reason)
        assert ("torch's own kernels" in found.reason) == (expected != 1)


@NEEDS_BF16
@pytest.mark.parametrize(
    ("plain", "packed", "rounded", "expected"),
    [
        ((2.0,) * 4, (1.0,) * 4, (0.5,) * 4, torch.bfloat16),
        ((2.0,) * 4, (1.0,) * 4, (0.5, 0.5, 0.5, 1.0), None),
        ((1.0,) * 4, (2.0,) * 4, (0.9,) * 4, torch.bfloat16),
        ((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, None),
    ],
    ids=["faster", "not for every number of rows", "where packed ones are slower", "no faster than torch's"],
)
def test_weights_that_may_be_rounded_are_where_that_is_faster(monkeypatch, plain, packed, rounded, expected):
    large = [torch.randn(2048, 1024) for _ in range(3)]
    pairs = [*zip(plain, packed, strict=True), *zip(plain, rounded, strict=True)]
    monkeypatch.setattr(packed_linear, "_seconds", taking([seconds for pair in pairs for seconds in pair]))
    found = choose_kernels(large, may_round=True)
    assert found.dtype == expected
    assert ("bfloat16" in found.reason) == (expected is not None)


def test_a_command_prints_which_kernels_its_target_got(monkeypatch, tmp_path, capsys):
    chosen = Kernels(None, "linear layers: torch's own kernels, because of this test")
    monkeypatch.setattr(target_model, "stay_in_cache", lambda _: False)
    monkeypatch.setattr(target_model, "choose_kernels", lambda *_, **__: chosen)
    run_command(lambda: load_target(tmp_path, num_hidden_layers=1))
    assert capsys.readouterr().err.splitlines()[-1] == f"target {tmp_path}: {chosen.reason}"
    load_target(tmp_path, num_hidden_layers=1)  # a library prints nothing by itself
    assert "linear layers" not in capsys.readouterr().err


def test_kernels_that_compute_less_precisely_are_not_used(monkeypatch):
    """oneDNN may be told to multiply float32 in bfloat16: faster, and no longer the target's text."""
    large = [torch.randn(2048, 1024) for _ in range(3)]
    monkeypatch.setattr(packed_linear, "_seconds", lambda *runs: [2.0, 1.0])
    assert choose_kernels(large).are_packed
    monkeypatch.setattr(
        packed_linear, "_packed_linear", lambda x, packed, bias: F.linear(x.bfloat16(), large[0].bfloat16()).float()
    )
    found = choose_kernels(3 * large[:1])
    assert not found.are_packed
    assert "differ by" in found.reason
    assert "more than rounding" in found.reason


def products(clock: list[float], seconds: Callable[[int, int], float]) -> list[Callable[[], None]]:
    """Six products; number `index` takes `seconds(index, turn)` of this clock."""
    turns = [0] * 6

    def product(index: int) -> None:
        clock[0] += seconds(index, turns[index])
        turns[index] += 1

    return [partial(product, index) for index in range(6)]


def test_each_product_counts_with_its_own_shortest_time(monkeypatch):
    """Other work disturbs every product in every turn but one."""
    clock = [0.0]
    monkeypatch.setattr(packed_linear.time, "perf_counter", lambda: clock[0])

    def disturbed(seconds: float) -> Callable[[int, int], float]:
        return lambda index, turn: seconds if turn == 3 + index else seconds + 0.01

    found = packed_linear._seconds(products(clock, disturbed(2e-3)), products(clock, disturbed(1e-3)))
    assert found == pytest.approx([12e-3, 6e-3])


def test_timing_stops_after_two_turns_on_a_busy_machine(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(packed_linear.time, "perf_counter", lambda: clock[0])
    packed_linear._seconds(products(clock, lambda index, turn: 0.2), products(clock, lambda index, turn: 0.1))
    assert clock[0] == pytest.approx(2 * 6 * 0.3)
