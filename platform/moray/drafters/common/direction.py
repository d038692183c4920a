"""Vectors brought to length one, with a gradient of its own: what root-mean-square norms are made of."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class Direction(torch.autograd.Function):
    """x / sqrt(|x|^2 + floor^2): its gradient passes over memory four times, autograd's nine."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "*any width"], floor: Float[Tensor, ""]) -> Float[Tensor, "*any width"]:
        shrink = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(floor).reciprocal()
        result = x * shrink
        ctx.save_for_backward(result, shrink)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "*any width"]) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With respect to `x`: what of the gradient is not along it, shrunk as it was."""
        result, shrink = ctx.saved_tensors
        along = torch.linalg.vecdot(result, gradient)[..., None]
        return torch.addcmul(gradient, result, along, value=-1.0).mul_(shrink), None
