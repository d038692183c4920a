"""Attention backends for targets, plugged in through transformers' own interface.

On CPUs, torch's kernel handles grouped key/value heads and masks together, so the stock backend's copies of keys and
values for each query head (`repeat_kv`) are not needed: a verify pass of the small demo target takes 12 % less time.
With few queries, the query heads of a group are computed together (`attend_grouped`), by Moray's own kernel where that
is used (see `targets.kernels.attention`). On a GPU the stock backend picks better kernels and is used. Both also
accept, instead of a mask, the visibility rule of a whole training sequence (see `visibility`).

Modules that take two seconds to import are imported inside functions, because many processes import this module without
running a target.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moray.targets.kernels.attention import CompiledAttention
from moray.targets.visibility import Visible, attend_visible

GROUPED = "moray_grouped_sdpa"
STOCK = "moray_sdpa"
_GROUPED_MASK = "_moray_grouped"
_FEW = 64
"""Maximum number of queries per head for which a group is computed together: each of its heads needs a copy of the
mask."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    scaling: float | None = None,
    kernel: CompiledAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, [batch, heads, seq, head_dim] in, [batch, seq, heads, head_dim] out; by the
    `kernel`, if that is given and can compute it."""
    if isinstance(attention_mask, Visible):
        return attend_visible(query, key, value, attention_mask, scaling).transpose(1, 2), None
    if attention_mask is None and query.shape[2] > 1:
        out = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
    else:
        out = attend_grouped(query, key, value, attention_mask, scaling, kernel)
    return out.transpose(1, 2), None


def attend_grouped(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads slots head_dim"],
    value: Float[Tensor, "batch kv_heads slots head_dim"],
    mask: Float[Tensor, "#batch 1 #seq slots"] | Bool[Tensor, "#batch 1 #seq slots"] | None,
    scale: float | None = None,
    kernel: CompiledAttention | None = None,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Attention of query heads to the key/value head that their group shares; by the `kernel`, if that is
    given and can compute it.

    Without a mask, every query sees all slots. A CPU's fused kernel reads keys and values again for each head, and in
    half precision converts them each time. If the heads of a group are passed as further queries of one head, it does
    so once per group: in bfloat16, one query over a batch of caches is four to six times as fast. The last bits may
    differ. In float32 a single query gains nothing and is computed head by head.
    """
    batch, num_heads, seq, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if kernel is not None and kernel.can_compute(query, key, value, mask):
        return kernel(query, key, value, mask, head_dim**-0.5 if scale is None else scale)
    group = num_heads // num_kv_heads
    is_worth_it = query.device.type == "cpu" and seq <= _FEW and not (seq == 1 and query.dtype == torch.float32)
    if group == 1 or not is_worth_it:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=group > 1)
    queries = query.reshape(batch, num_kv_heads, group * seq, head_dim)
    masks = None if mask is None else _grouped_mask(mask, seq, group)
    attended = F.scaled_dot_product_attention(queries, key, value, attn_mask=masks, scale=scale)
    return attended.reshape(batch, num_heads, seq, head_dim)


def _grouped_mask(mask: Tensor, seq: int, group: int) -> Tensor:
    """The mask repeated for each query head of a group, created once for all layers that share it."""
    known: Tensor | None = getattr(mask, _GROUPED_MASK, None)
    if known is None or known.shape[2] != group * seq:
        known = mask.expand(-1, -1, seq, -1).repeat(1, 1, group, 1)
        setattr(mask, _GROUPED_MASK, known)  # kept as long as the mask of the pass
    return known


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' own "sdpa", with the same shapes."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, Visible):
        return attend_visible(query, key, value, attention_mask, scaling).transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)


def attention_backend(device_type: str) -> str:
    """The backend to load a target with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name, attention = (GROUPED, grouped_attention) if device_type == "cpu" else (STOCK, stock_attention)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
