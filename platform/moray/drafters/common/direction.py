"""Normalising vectors to length one, with its own gradient: the core of root-mean-square norms."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class Direction(torch.autograd.Function):
    """x / sqrt(|x|^2 + floor^2): its gradient passes over memory four times, autograd's nine times."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "*any width"], floor: Float[Tensor, ""]) -> Float[Tensor, "*any width"]:
        shrink = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(floor).reciprocal()
        result = x * shrink
        ctx.save_for_backward(result, shrink)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "*any width"]) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient with respect to `x`: the part of `gradient` perpendicular to `x`, scaled like `x`."""
        result, shrink = ctx.saved_tensors
        along = torch.linalg.vecdot(result, gradient)[..., None]
        return torch.addcmul(gradient, result, along, value=-1.0).mul_(shrink), None
