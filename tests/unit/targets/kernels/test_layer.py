"""The compiled parts of a decoder layer: the results of the operations that they replace, row by row."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from moray.targets.kernels.compiled import CompiledKernels, CompiledWeight, load_kernels, loaded_kernels
from moray.targets.kernels.layer import BeforeAttention, BehindAttention

pytestmark = pytest.mark.skipif(
    not isinstance(load_kernels(), CompiledKernels), reason="g++ or Linux is missing, which compiled kernels need"
)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 54, 70, 4, 2, 10
EPSILON = 1e-5
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
by_dtype = pytest.mark.parametrize("dtype", TOLERANCES)
by_bias = pytest.mark.parametrize("has_bias", [False, True])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)


def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], scale, EPSILON)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@by_dtype
@by_bias
@pytest.mark.parametrize(("batch", "new"), [(1, 1), (1, 4), (3, 5), (2, 17)])
def test_queries_and_keys_are_rotated_and_values_are_not(dtype, has_bias, batch, new):
    qkv, norm = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, dtype), torch.rand(HIDDEN).to(dtype)
    bias = torch.randn(len(qkv)).to(dtype) if has_bias else None
    packed = CompiledWeight(loaded_kernels(), qkv)
    part = BeforeAttention(loaded_kernels(), norm, EPSILON, packed, bias, HEADS + KV_HEADS, HEAD_DIM)
    hidden = (3 * torch.randn(batch, new, HIDDEN)).to(dtype)
    cosines, sines = (torch.rand(batch, new, HEAD_DIM).to(dtype) for _ in range(2))
    found = part(hidden, (cosines, sines))
    wide = None if bias is None else bias.double()
    heads = F.linear(normed(hidden.double(), norm.double()), qkv.double(), wide)
    heads = heads.view(batch, new, -1, HEAD_DIM).transpose(1, 2)
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cosines[:, None].double() + torch.cat([-second, first], dim=-1) * sines[:, None].double()
    num_turned = HEADS + KV_HEADS
    close(found, torch.cat([turned[:, :num_turned], heads[:, num_turned:]], dim=1))


def behind(dtype: torch.dtype, has_bias: bool) -> tuple[BehindAttention, tuple[torch.Tensor, ...]]:
    inner = HEADS * HEAD_DIM
    shapes = ((HIDDEN, inner), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    weights = [weight(*shape, dtype) for shape in shapes]
    biases = [torch.randn(len(one)).to(dtype) if has_bias else None for one in weights]
    norm = torch.rand(HIDDEN).to(dtype)
    out, gate_up, down = (CompiledWeight(loaded_kernels(), one) for one in weights)
    part = BehindAttention(loaded_kernels(), norm, EPSILON, (out, gate_up, down), (biases[0], biases[1], biases[2]))
    given = [torch.zeros(len(one)) if bias is None else bias for one, bias in zip(weights, biases, strict=True)]
    return part, (norm, *weights, *given)


@by_dtype
@by_bias
@pytest.mark.parametrize(("batch", "new"), [(1, 1), (1, 4), (3, 5), (2, 17)])
def test_the_mlp_and_both_sums(dtype, has_bias, batch, new):
    part, given = behind(dtype, has_bias)
    norm, out, gate_up, down, *biases = (one.double() for one in given)
    attended = torch.randn(batch, new, HEADS * HEAD_DIM).to(dtype)
    hidden = (3 * torch.randn(batch, new, HIDDEN)).to(dtype)
    middle = hidden.double() + F.linear(attended.double(), out, biases[0])
    gate, up = F.linear(normed(middle, norm), gate_up, biases[1]).chunk(2, dim=-1)
    close(part(attended, hidden), middle + F.linear(F.silu(gate) * up, down, biases[2]))


@by_dtype
def test_large_gates_neither_overflow_nor_vanish(dtype):
    """SiLU is 0 far below zero and its input far above."""
    _, (norm, out, gate_up, *_) = behind(dtype, has_bias=True)
    eye = torch.zeros(HIDDEN, INNER, dtype=dtype)
    eye[:, :HIDDEN] = torch.eye(HIDDEN)
    kernels = partial(CompiledWeight, loaded_kernels())
    bias = torch.cat([torch.linspace(-200, 200, INNER), torch.ones(INNER)]).to(dtype)
    weights = (kernels(torch.zeros_like(out)), kernels(torch.zeros_like(gate_up)), kernels(eye))
    part = BehindAttention(loaded_kernels(), norm, EPSILON, weights, (None, bias, None))
    found = part(torch.zeros(1, 1, HEADS * HEAD_DIM, dtype=dtype), torch.zeros(1, 1, HIDDEN, dtype=dtype))
    close(found[0, 0], F.silu(bias[:HIDDEN].double()))


@by_dtype
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    part, _ = behind(dtype, has_bias=False)
    attended = torch.randn(1, 29, HEADS * HEAD_DIM).to(dtype)
    hidden = torch.randn(1, 29, HIDDEN).to(dtype)
    together = part(attended, hidden)
    for begin in range(0, 29, 3):
        for end in (begin + 1, begin + 4, begin + 13):
            assert torch.equal(part(attended[:, begin:end], hidden[:, begin:end]), together[:, begin:end])
