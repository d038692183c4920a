"""Compiled attention: torch's results, row by row, whatever else is computed with a query."""

import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import CPUS, kernels_for, needs_compiler
from jaxtyping import TypeCheckError

from moray.targets.attention import attend_grouped
from moray.targets.kernels.attention import CompiledAttention
from moray.targets.kernels.kinds import stock_kernels

pytestmark = needs_compiler
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
by_dtype = pytest.mark.parametrize("dtype", TOLERANCES)
KV_HEADS, GROUP = 2, 3


@pytest.fixture(scope="module", params=CPUS)
def attends(request, tmp_path_factory):
    for kernels in kernels_for(request.param, tmp_path_factory.mktemp("cache")):
        yield CompiledAttention(kernels)


@pytest.fixture(autouse=True, params=[1, 3], ids=lambda threads: f"{threads} threads")
def threads(request):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def some_heads(batch: int, new: int, slots: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values as in a pass: heads of one projection, and the first slots of a longer cache."""
    query = torch.randn(batch, new, 2 * KV_HEADS * GROUP, head_dim).to(dtype).transpose(1, 2)[:, : KV_HEADS * GROUP]
    cache = torch.randn(2, batch, KV_HEADS, slots + 5, head_dim).to(dtype)
    return [query, *cache[..., :slots, :]]


def some_mask(batch: int, new: int, slots: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.where(torch.rand(batch, 1, new, slots) < 0.4, -torch.inf, torch.randn(batch, 1, new, slots))
    mask[..., 0] = 0.0
    return mask.to(dtype)


@by_dtype
@pytest.mark.parametrize(
    ("batch", "new", "slots", "head_dim"),
    [(1, 1, 1, 64), (1, 1, 33, 80), (1, 5, 16, 64), (2, 3, 100, 48), (3, 17, 31, 256), (5, 2, 7, 16)],
)
def test_attention_is_that_of_torch(attends, dtype, batch, new, slots, head_dim):
    query, key, value = some_heads(batch, new, slots, head_dim, dtype)
    mask = some_mask(batch, new, slots, dtype)
    for one in (None, mask, mask[:1], mask[:, :, :1]):
        assert attends.can_compute(query, key, value, one)
        seen = None if one is None else one.double()
        wanted = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), attn_mask=seen, scale=0.3, enable_gqa=True
        )
        found = attend_grouped(query, key, value, one, 0.3, attends)
        assert torch.equal(found, attends(query, key, value, one, 0.3))
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@by_dtype
def test_a_query_has_the_same_bits_alone_among_others_and_with_more_hidden_slots(attends, dtype):
    query, key, value = some_heads(4, 13, 70, 64, dtype)
    mask = some_mask(4, 13, 70, dtype)
    mask[..., 41:] = -torch.inf
    together = attends(query, key, value, mask, 0.125)
    for row in range(4):
        own, seen = slice(row, row + 1), mask[row : row + 1, ..., :41]
        shorter = key[own, :, :41], value[own, :, :41]
        assert torch.equal(attends(query[own], *shorter, seen, 0.125), together[own])
        for token in (0, 5, 12):
            alone = attends(query[own, :, token : token + 1], *shorter, seen[:, :, token : token + 1], 0.125)
            assert torch.equal(alone, together[own, :, token : token + 1])


@by_dtype
def test_scores_far_apart_neither_overflow_nor_add_to_the_sum(attends, dtype):
    query, key, value = (torch.ones(1, heads, slots, 64, dtype=dtype) for heads, slots in ((2, 1), (1, 40), (1, 40)))
    key[:, :, 7], key[:, :, 8] = 100, -100
    value[:, :, 7] = 3
    assert torch.equal(attends(query, key, value, None, 1.0), torch.full_like(query, 3))
    mask = torch.zeros(1, 1, 1, 40, dtype=dtype)
    mask[..., 7] = -torch.inf
    key.fill_(300)
    assert torch.equal(attends(query, key, value, mask, 1.0), torch.ones_like(query))


def test_gradients_and_the_baseline_are_left_to_torch(attends):
    query, key, value = some_heads(1, 3, 9, 64, torch.float32)
    assert attends.can_compute(query, key, value, None)
    with stock_kernels():
        assert not attends.can_compute(query, key, value, None)
    with torch.inference_mode(False), torch.enable_grad():
        assert not attends.can_compute(query, key, value, None)


def test_a_query_that_sees_nothing_gets_zeros(attends):
    query, key, value = some_heads(1, 2, 9, 64, torch.float32)
    mask = torch.full((1, 1, 2, 9), -torch.inf)
    mask[..., 1, 3] = 0
    found = attends(query, key, value, mask, 1.0)
    assert not found[:, :, 0].any()
    torch.testing.assert_close(found[:, :, 1], value[:, :, 3].repeat_interleave(GROUP, 1))


def test_what_the_kernel_is_not_made_for_is_left_to_torch(attends):
    query, key, value = some_heads(1, 3, 9, 64, torch.float32)
    mask = some_mask(1, 3, 9, torch.float32)
    assert not attends.can_compute(query.half(), key.half(), value.half(), None)
    assert not attends.can_compute(query, key.bfloat16(), value, None)
    assert not attends.can_compute(query, key, value, mask > 0)
    assert not attends.can_compute(query[..., :63], key[..., :63], value[..., :63], None)
    assert not attends.can_compute(*some_heads(1, 1, 2, 512, torch.float32), None)
    assert not attends.can_compute(*some_heads(1, 25, 25, 64, torch.float32), None)
    assert not attends.can_compute(query, key.transpose(2, 3).contiguous().transpose(2, 3), value, None)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask > 0, enable_gqa=True)
    torch.testing.assert_close(attend_grouped(query, key, value, mask > 0, None, attends), wanted)
    for wrong in ((key, value, mask[..., :8]), (key, value[:, :, :8], None)):
        with pytest.raises((AssertionError, TypeCheckError)):
            attends(query, *wrong, 1.0)
