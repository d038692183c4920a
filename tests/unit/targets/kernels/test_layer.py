"""The compiled parts of a decoder layer: the results of the operations that they replace, row by row."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import CPUS, kernels_for, needs_compiler

from moray.targets.kernels.compiled import CompiledKernels, CompiledWeight
from moray.targets.kernels.layer import AfterAttention, BeforeAttention

pytestmark = needs_compiler
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 54, 70, 4, 2, 10
EPSILON = 1e-5
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
by_dtype = pytest.mark.parametrize("dtype", TOLERANCES)
SHAPES = [(1, 1), (1, 4), (3, 5), (2, 17)]
by_bias = pytest.mark.parametrize("has_bias", [False, True])


@pytest.fixture(scope="module", params=CPUS)
def kernels(request, tmp_path_factory):
    yield from kernels_for(request.param, tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, params=[1, 3], ids=lambda threads: f"{threads} threads")
def threads(request):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)


def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], scale, EPSILON)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def before(kernels: CompiledKernels, dtype: torch.dtype, has_bias: bool) -> tuple[BeforeAttention, Any]:
    qkv, norm = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, dtype), torch.rand(HIDDEN).to(dtype)
    bias = torch.randn(len(qkv)).to(dtype) if has_bias else None
    packed = CompiledWeight(kernels, qkv)
    part = BeforeAttention(kernels, norm, EPSILON, packed, bias, HEADS + KV_HEADS, HEAD_DIM)
    return part, (norm.double(), qkv.double(), None if bias is None else bias.double())


@by_dtype
@by_bias
@pytest.mark.parametrize(("batch", "new"), SHAPES)
def test_queries_and_keys_are_rotated_and_values_are_not(kernels, dtype, has_bias, batch, new):
    part, (norm, qkv, bias) = before(kernels, dtype, has_bias)
    hidden = (3 * torch.randn(batch, new, HIDDEN)).to(dtype)
    cosines, sines = (torch.rand(batch, new, HEAD_DIM).to(dtype) for _ in range(2))
    found = part(hidden, (cosines, sines))
    heads = F.linear(normed(hidden.double(), norm), qkv, bias).view(batch, new, -1, HEAD_DIM).transpose(1, 2)
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cosines[:, None].double() + torch.cat([-second, first], dim=-1) * sines[:, None].double()
    num_rotated = HEADS + KV_HEADS
    close(found, torch.cat([turned[:, :num_rotated], heads[:, num_rotated:]], dim=1))


def after(kernels: CompiledKernels, dtype: torch.dtype, has_bias: bool) -> tuple[AfterAttention, Any]:
    shapes = ((HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    weights = [weight(*shape, dtype) for shape in shapes]
    biases = [torch.randn(len(one)).to(dtype) if has_bias else None for one in weights]
    norm = torch.rand(HIDDEN).to(dtype)
    out, gate_up, down = (CompiledWeight(kernels, one) for one in weights)
    part = AfterAttention(kernels, norm, EPSILON, (out, gate_up, down), (biases[0], biases[1], biases[2]))
    return part, [None if one is None else one.double() for one in (norm, *weights, *biases)]


@by_dtype
@by_bias
@pytest.mark.parametrize(("batch", "new"), SHAPES)
def test_the_mlp_and_both_sums(kernels, dtype, has_bias, batch, new):
    part, (norm, out, gate_up, down, *biases) = after(kernels, dtype, has_bias)
    attended = torch.randn(batch, new, HEADS * HEAD_DIM).to(dtype)
    hidden = (3 * torch.randn(batch, new, HIDDEN)).to(dtype)
    middle = hidden.double() + F.linear(attended.double(), out, biases[0])
    gate, up = F.linear(normed(middle, norm), gate_up, biases[1]).chunk(2, dim=-1)
    close(part(attended, hidden), middle + F.linear(F.silu(gate) * up, down, biases[2]))


@by_dtype
def test_large_gates_neither_overflow_nor_vanish(kernels, dtype):
    """SiLU is 0 far below zero and its input far above."""
    down = torch.zeros(HIDDEN, INNER, dtype=dtype)
    down[:, :HIDDEN] = torch.eye(HIDDEN)
    nothing = (torch.zeros(HIDDEN, HEADS * HEAD_DIM), torch.zeros(2 * INNER, HIDDEN))
    out, gate_up, eye = (CompiledWeight(kernels, one.to(dtype)) for one in (*nothing, down))
    bias = torch.cat([torch.linspace(-200, 200, INNER), torch.ones(INNER)]).to(dtype)
    part = AfterAttention(kernels, torch.ones(HIDDEN, dtype=dtype), EPSILON, (out, gate_up, eye), (None, bias, None))
    found = part(torch.zeros(1, 1, HEADS * HEAD_DIM, dtype=dtype), torch.zeros(1, 1, HIDDEN, dtype=dtype))
    close(found[0, 0], F.silu(bias[:HIDDEN].double()))


@by_dtype
def test_a_row_of_a_layer_has_the_same_bits_alone_and_among_others(kernels, dtype):
    first, second = before(kernels, dtype, has_bias=True)[0], after(kernels, dtype, has_bias=True)[0]
    attended = torch.randn(1, 29, HEADS * HEAD_DIM).to(dtype)
    hidden = torch.randn(1, 29, HIDDEN).to(dtype)
    rotation = torch.rand(1, 29, HEAD_DIM).to(dtype), torch.rand(1, 29, HEAD_DIM).to(dtype)
    heads, outputs = first(hidden, rotation), second(attended, hidden)
    for begin in range(0, 29, 3):
        for end in (begin + 1, begin + 4, begin + 13):
            own = slice(begin, end)
            assert torch.equal(second(attended[:, own], hidden[:, own]), outputs[:, own])
            found = first(hidden[:, own], (rotation[0][:, own], rotation[1][:, own]))
            assert torch.equal(found, heads[:, :, own])
    apart = first(hidden.transpose(0, 1), (rotation[0].transpose(0, 1), rotation[1].transpose(0, 1)))
    assert torch.equal(apart, heads.permute(2, 1, 0, 3)), "one sequence of 29 tokens, and 29 of one"


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, HEAD_DIM), (torch.float32, HEAD_DIM // 2)])
def test_inputs_that_kernels_cannot_read_are_refused(kernels, dtype, width):
    part, _ = before(kernels, torch.float32, has_bias=False)
    cosines = torch.rand(1, 2, width)
    with pytest.raises(AssertionError, match="was given to a kernel for"):
        part(torch.zeros(1, 2, HIDDEN, dtype=dtype), (cosines, cosines))
