"""Attention backends for targets, plugged in through transformers' own interface.

On CPUs torch's kernel handles grouped key/value heads and masks together, so the copies of every key and value
that the stock backend makes for each query head (`repeat_kv`) are not needed: 12 % off a verify pass of the
demo target. On a GPU the stock backend picks better kernels and stays. Both also take, in place of a mask, the
rule of a whole training sequence (see `visibility`).

What is imported inside functions costs two seconds, and many processes import this module without running a target.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moray.targets.visibility import Visible, attend_visible

GROUPED = "moray_grouped_sdpa"
STOCK = "moray_sdpa"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, [batch, heads, seq, head_dim] in, [batch, seq, heads, head_dim] out."""
    if isinstance(attention_mask, Visible):
        return attend_visible(query, key, value, attention_mask, scaling).transpose(1, 2), None
    causal = attention_mask is None and query.shape[2] > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2), None


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
