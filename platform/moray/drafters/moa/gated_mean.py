"""The mean of gated activations, with its own gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class GatedMean(torch.autograd.Function):
    """mean over positions of silu(gate) * up. The incoming gradient is the same for all positions, so this makes three
    passes over the large tensors where autograd makes eight."""

    @staticmethod
    def forward(ctx: Any, gate_up: Float[Tensor, "batch seq twice"]) -> Float[Tensor, "batch intermediate"]:
        gate, up = gate_up.chunk(2, dim=-1)
        ctx.save_for_backward(gate_up)
        return (F.silu(gate) * up).mean(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "batch intermediate"]) -> Float[Tensor, "batch seq twice"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        share = (gradient / gate_up.shape[1])[:, None]
        result = torch.empty_like(gate_up)
        to_gate, to_up = result.chunk(2, dim=-1)
        torch.mul(F.silu(gate), share, out=to_up)
        torch.ops.aten.silu_backward.grad_input(up * share, gate, grad_input=to_gate)
        return result
