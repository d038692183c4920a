"""Weights with copies for a CPU's kernels: torch's results to rounding, and plain weights where they are asked for."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import needs_compiler
from torch import nn

from moray.targets.kernels import weights
from moray.targets.kernels.compiled import CompiledWeight
from moray.targets.kernels.kinds import ALL_ROWS, Kernels, stock_kernels
from moray.targets.kernels.weights import PackedLinear, PackedWeight, has_packed_kernels, pack_linears

PACKED, COMPILED = Kernels(1, "for a test"), Kernels(None, "for a test", compiled_up_to=ALL_ROWS)
OUTPUTS, INPUTS = 48, 32
NEEDS_BF16 = pytest.mark.skipif(
    not has_packed_kernels(torch.bfloat16), reason="this CPU has no instructions that oneDNN wants for bf16"
)
BOTH = Kernels(4, "for a test", compiled_up_to=2)
KINDS = [PACKED, pytest.param(COMPILED, marks=needs_compiler), pytest.param(BOTH, marks=needs_compiler)]


def packed_model(dtype: torch.dtype = torch.float32, kernels: Kernels = PACKED) -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.SiLU())
    model = nn.Sequential(inner, nn.Linear(OUTPUTS, INPUTS, bias=False)).to(dtype).requires_grad_(False)
    pack_linears(model, kernels)
    return model


def plainly(model: Any, x: torch.Tensor) -> torch.Tensor:
    (first, _), second = model[0], model[1]
    return F.linear(F.silu(F.linear(x, first.weight, first.bias)), second.weight)


@pytest.mark.parametrize("kernels", KINDS, ids=["packed", "compiled", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_BF16)])
@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (5,), (3, 17), (0,)])
@torch.inference_mode()
def test_results_are_those_of_plain_weights(shape, dtype, kernels):
    model = packed_model(dtype, kernels)
    assert [type(module) for module in (model[0][0], model[1])] == [PackedLinear] * 2
    x = torch.randn(*shape, INPUTS).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(model(x), plainly(model, x), atol=tolerance, rtol=tolerance)
    sliced = torch.randn(*shape, 2 * INPUTS).to(dtype)[..., ::2]
    torch.testing.assert_close(model(sliced), plainly(model, sliced), atol=tolerance, rtol=tolerance)


@NEEDS_BF16
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kernels", KINDS, ids=["packed", "compiled", "both"])
@torch.inference_mode()
def test_rounded_weights_give_nearly_the_same_in_the_inputs_number_format(rows, kernels):
    model = packed_model(kernels=dataclasses.replace(kernels, dtype=torch.bfloat16))
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
        weights, "packed_linear", lambda x, packed, bias: used.append(1) or x.new_zeros(*x.shape[:-1], INPUTS)
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


@needs_compiler
@torch.inference_mode()
def test_compiled_kernels_are_used_up_to_their_largest_row_count(monkeypatch):
    both = PackedWeight(torch.randn(OUTPUTS, INPUTS), Kernels(4, "", compiled_up_to=2))
    used: list[str] = []
    compiled = CompiledWeight.linear
    monkeypatch.setattr(CompiledWeight, "linear", lambda *args: used.append("compiled") or compiled(*args))
    monkeypatch.setattr(weights, "packed_linear", lambda x, *_: used.append("packed") or x.new_zeros(len(x), OUTPUTS))
    for rows in (1, 2, 3, 4):
        both.linear(torch.randn(rows, INPUTS))
    with stock_kernels():
        both.linear(torch.randn(1, INPUTS))
    assert used == ["compiled", "compiled", "packed"]


@needs_compiler
@torch.inference_mode()
def test_half_a_word_in_a_row_is_left_to_torch():
    """A part of a split target may be so, though the first process's part, on which kernels are chosen, is not."""
    weight = torch.randn(OUTPUTS, 33).bfloat16()
    odd = PackedWeight(weight, COMPILED)
    assert odd.compiled is None
    x = torch.randn(2, 33).bfloat16()
    assert torch.equal(odd.linear(x), F.linear(x, weight))
