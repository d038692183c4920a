"""Attention of training: tokens that skip a layer are hidden from it by a factor, through which routers learn.

    attended = sum_k p_k w_k v_k / (sum_k p_k w_k + 1e-6)       p: softmax of the causal scores, w_k in {0, 1}

For w in {0, 1} this is the softmax over the tokens that run. As a factor, w has a gradient also where it is 0.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_FLOOR = 1e-6


def attend_evicted(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads seq head_dim"],
    value: Float[Tensor, "batch kv_heads seq head_dim"],
    runs: Float[Tensor, "batch seq"],
    scale: float,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Causal attention of whole sequences to the tokens that run."""
    batch, num_heads, seq, head_dim = query.shape
    groups = query.view(batch, key.shape[1], -1, seq, head_dim)
    scores = groups @ key.transpose(-1, -2)[:, :, None] * scale
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu(1)
    shares = scores.float().masked_fill(hidden, -torch.inf).softmax(dim=-1) * runs[:, None, None, None]
    shares = shares / (shares.sum(dim=-1, keepdim=True) + _FLOOR)
    return (shares.to(value.dtype) @ value[:, :, None]).view(batch, num_heads, seq, head_dim)
