"""An attention backend for targets on CPUs, plugged in through transformers' own interface.

torch's CPU kernel handles grouped key/value heads and masks together, so the copies of every key and value
that the stock backend makes for each query head (`repeat_kv`) are not needed: 12 % off a verify pass of the
demo target. On a GPU the stock backend picks better kernels and stays.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

GROUPED = "moray_grouped_sdpa"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, [batch, heads, seq, head_dim] in, [batch, seq, heads, head_dim] out."""
    causal = attention_mask is None and query.shape[2] > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2), None


def attention_backend(device_type: str) -> str:
    """The backend to load a target with."""
    if device_type != "cpu":
        return "sdpa"
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    return GROUPED
