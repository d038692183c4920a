"""Muon with its updates distributed over data-parallel workers.

    gradients, the same on all workers -> each worker updates its own matrices -> the owners broadcast them

The update of a matrix takes fifteen products of matrices of its size, whatever the batch size. If every worker computes
all updates, they are a large part of a step with small batches. Distributed, the resulting weights are bit-for-bit the
same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_MOMENTUM = "momentum_buffer"


class SharedMuon(torch.optim.Muon):
    """torch's Muon for the processes of one group, which must all call `step` and `gather` together."""

    def __init__(self, matrices: Sequence[Tensor], **settings: Any) -> None:
        """
        Args:
            matrices: the same on every worker, in the same order.
            settings: those of `torch.optim.Muon`.
        """
        super().__init__(matrices, **settings)
        owners = share_out([_cost(matrix) for matrix in matrices], torch.distributed.get_world_size())
        self._owned = tuple(zip(matrices, owners, strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this worker's matrices and receive the others; the others' gradients are dropped."""
        rank = torch.distributed.get_rank()
        for matrix, owner in self._owned:
            if owner != rank:
                matrix.grad = None  # Muon skips matrices without a gradient
        loss = super().step(closure)
        _broadcast([(matrix.detach(), owner) for matrix, owner in self._owned])
        return loss

    def gather(self) -> None:
        """Send the momentum of all matrices to every worker, for a checkpoint."""
        for matrix, _ in self._owned:
            self.state[matrix].setdefault(_MOMENTUM, torch.zeros_like(matrix))
        _broadcast([(self.state[matrix][_MOMENTUM], owner) for matrix, owner in self._owned])


def share_out(costs: Sequence[float], num_workers: int) -> list[int]:
    """Assign each cost to a worker so that their loads are about equal: largest first, to the least loaded worker."""
    owners, sums = [0] * len(costs), [0.0] * num_workers
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = sums.index(min(sums))
        sums[owners[index]] += costs[index]
    return owners


def _cost(matrix: Tensor) -> float:
    """Multiplications in one Newton-Schulz iteration: two products with the matrix, one of its Gram matrix."""
    small, large = sorted(matrix.shape)
    return float(2 * small**2 * large + small**3)


def _broadcast(tensors: Sequence[tuple[Tensor, int]]) -> None:
    sent = [torch.distributed.broadcast(tensor, owner, async_op=True) for tensor, owner in tensors]
    for work in sent:
        if work is not None:
            work.wait()
