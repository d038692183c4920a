"""Linear layers of which each rank of a tensor-parallel target holds some inputs."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RowParallelLinear(nn.Linear):
    """A linear layer over a part of its inputs, whose output is the sum over all ranks. One rank holds the bias."""

    def __init__(
        self, whole: nn.Linear, num_inputs: int, has_bias: bool, sum_ranks: Callable[[Tensor], Tensor]
    ) -> None:
        """Has the outputs, device and dtype of `whole`; the weights are yet to be filled in."""
        weight = whole.weight
        super().__init__(num_inputs, whole.out_features, has_bias, weight.device, weight.dtype)
        self.sum_ranks = sum_ranks

    def forward(self, input: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:  # noqa: A002
        """The sum over all ranks of x weight^T, and the bias."""
        return self.sum_ranks(F.linear(input, self.weight, self.bias))
