"""Attention of grouped heads: what each query head gives with a copy of its key/value head."""

import pytest
import torch
import torch.nn.functional as F

from moray.targets.attention import attend_grouped

HEAD_DIM, SLOTS = 16, 70


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq", [1, 5, 65])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (9, 3), (4, 4), (3, 1)])
def test_a_group_shares_its_keys_and_values(num_heads, num_kv_heads, is_masked, seq, dtype):
    torch.manual_seed(seq)
    batch, group = 3, num_heads // num_kv_heads
    query = torch.randn(batch, seq, num_heads, HEAD_DIM).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, num_kv_heads, 2 * SLOTS, HEAD_DIM)[..., :SLOTS, :].to(dtype)
    hidden = torch.rand(batch, 1, seq, SLOTS) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf) if is_masked else None
    wanted = F.scaled_dot_product_attention(
        query.double(),
        key.double().repeat_interleave(group, dim=1),
        value.double().repeat_interleave(group, dim=1),
        attn_mask=None if mask is None else mask.double(),
        scale=0.3,
    )
    found = attend_grouped(query, key, value, mask, 0.3)
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
