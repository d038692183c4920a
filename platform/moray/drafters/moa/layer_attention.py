"""Layer self-attention's kernel for CPUs: rotary attention without a mask over short sequences, with its own
gradient."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from moray.drafters.common.layers import Rotary


class LayerAttention(torch.autograd.Function):
    """Multi-head attention on queries, keys and values side by side, as one projection produces them.

    It reads and writes heads in place. Autograd, which copies, splits and rejoins a view of every head, passes over
    memory twice as often; fused kernels are made for long sequences.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Float[Tensor, "batch seq three"], rotary: Rotary, num_heads: int) -> Tensor:
        """[batch, seq, width] from [batch, seq, 3 width]: queries of all heads, then keys, then values; float32."""
        width = qkv.shape[2] // 3
        turns = rotary.repeat(1, 2 * num_heads)  # for all heads in one row: longer inner loops
        turned = _as_reals(_as_pairs(qkv[..., : 2 * width]) * turns)
        query, key = (_heads(part, num_heads) for part in turned.split(width, dim=2))
        value = _heads(qkv[..., 2 * width :], num_heads)
        result = qkv.new_empty(*qkv.shape[:2], width)
        weights = []
        for head, mixed in enumerate(_heads(result, num_heads)):
            scores = torch.bmm(query[head], key[head].transpose(1, 2)).mul_(mixed.shape[2] ** -0.5)
            weights.append(scores.softmax(dim=-1))
            mixed.copy_(torch.bmm(weights[-1], value[head]))
        ctx.save_for_backward(qkv, turned, turns, *weights)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "batch seq width"]) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient with respect to `qkv`."""
        qkv, turned, turns, *weights = ctx.saved_tensors
        num_heads, width = len(weights), gradient.shape[2]
        result = torch.empty_like(qkv)
        to_query, to_key, to_value = (_heads(part, num_heads) for part in result.split(width, dim=2))
        query, key = (_heads(part, num_heads) for part in turned.split(width, dim=2))
        value = _heads(qkv[..., 2 * width :], num_heads)
        for head, upstream in enumerate(_heads(gradient, num_heads)):
            weight = weights[head]
            to_value[head].copy_(torch.bmm(weight.transpose(1, 2), upstream))
            to_weight = torch.bmm(upstream, value[head].transpose(1, 2))
            to_scores = torch.ops.aten._softmax_backward_data(to_weight, weight, -1, weight.dtype)
            to_scores.mul_(upstream.shape[2] ** -0.5)
            to_query[head].copy_(torch.bmm(to_scores, key[head]))
            to_key[head].copy_(torch.bmm(to_scores.transpose(1, 2), query[head]))
        _as_pairs(result[..., : 2 * width]).mul_(turns.conj())
        return result, None, None


def _heads(x: Float[Tensor, "batch seq width"], num_heads: int) -> tuple[Tensor, ...]:
    """Views [batch, seq, head_dim], one per head."""
    return x.split(x.shape[2] // num_heads, dim=2)


def _as_pairs(x: Float[Tensor, "batch seq width"]) -> Tensor:
    """The same memory viewed as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _as_reals(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)
