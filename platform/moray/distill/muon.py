"""Muon for drafters that train on CPUs."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's Muon, whose updates it makes orthogonal in float32 on a CPU.

    torch does that in bfloat16, which a CPU takes half as long again for (matrices of a drafter of width 96 on
    AVX-512), and has nothing to gain from there. State and options are torch's.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all matrices that have a gradient.

        Raises:
            ValueError: a closure is given.
        """
        if closure is not None:
            raise ValueError("closure is given; gradients must be there already: leave it out")
        if any(matrix.device.type != "cpu" for group in self.param_groups for matrix in group["params"]):
            super().step()
            return
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group)

    def _update(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        rows, columns = matrix.shape
        matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalise(
    matrix: Float[Tensor, "rows columns"], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Float[Tensor, "rows columns"]:
    """The orthogonal factor U V' of a matrix U S V', about: Newton-Schulz in float32 (Jordan et al. 2024, "Muon")."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.float().T if is_tall else matrix.float()
    found = found / found.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.T if is_tall else found).to(matrix.dtype)
