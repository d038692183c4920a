"""Weights of linear layers with copies that a CPU's kernels read faster.

On a CPU, `F.linear` hands its weight to a BLAS that packs it again in each call, which costs more than the products for
the few rows of a verify pass. Here the weight is packed once: for oneDNN, for Moray's compiled kernels (see
`compiled`), or for both. The plain weight is kept too: for row counts where it is as fast, for gradients, for
torch.compile and for baselines (`stock_kernels`).

Weights whose results need not be exact, those of a drafter, may also be rounded to bfloat16: half the bytes to read.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from moray.targets.kernels.compiled import CompiledWeight, loaded_kernels
from moray.targets.kernels.kinds import Kernels, are_stock_kernels_wanted
from moray.targets.parallel.linear import RowParallelLinear

_HINT = 64
"""Row count for which oneDNN picks the layout; layouts for 4 to 64 rows are equally fast at any row count."""


class PackedWeight:
    """A weight and the copies of it that the kernels read."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], kernels: Kernels) -> None:
        """
        Raises:
            UnavailableError: the compiled kernels are asked for, and cannot be used on this machine.
        """
        self.weight, self._dtype = weight, kernels.dtype or weight.dtype
        rounded = weight.to(self._dtype)
        self._packed_from = kernels.packed_from
        self._packed = None if kernels.packed_from is None else pack(rounded)
        self._compiled_up_to = kernels.compiled_up_to
        is_compiled = kernels.compiled_up_to > 0 and loaded_kernels().can_compute(rounded, self._dtype)
        self.compiled = CompiledWeight(loaded_kernels(), rounded) if is_compiled else None
        """The copy that the compiled kernels read; None without them, or for half a word in a row."""

    def linear(
        self, x: Float[Tensor, "*batch inputs"], bias: Float[Tensor, " outputs"] | None = None
    ) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias."""
        if self.compiled is None and self._packed is None:
            return F.linear(x, self.weight, bias)
        if are_stock_kernels_wanted():
            return F.linear(x, self.weight, bias)
        rows = x.numel() // x.shape[-1]
        if self.compiled is not None and rows <= self._compiled_up_to:
            return self.compiled.linear(x.to(self._dtype), bias).to(x.dtype)
        if self._packed_from is None or self._packed is None or rows < self._packed_from:
            return F.linear(x, self.weight, bias)
        rounded = None if bias is None else bias.to(self._dtype)
        return packed_linear(x.to(self._dtype), self._packed, rounded).to(x.dtype)


class PackedLinear(nn.Module):
    """An `nn.Linear` with copies of its weight, and the same parameters."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.pack(kernels)

    def pack(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._both = PackedWeight(self.weight.detach(), kernels)

    @property
    def compiled(self) -> CompiledWeight | None:
        """The copy that Moray's own kernels read, if they are used."""
        return self._both.compiled

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias."""
        if self.weight.data_ptr() != self._both.weight.data_ptr():  # the weight was replaced since it was packed
            return F.linear(x, self.weight, self.bias)
        return self._both.linear(x, self.bias)


def linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights of a model's plain and row-parallel linear layers."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [one.weight.detach() for one in linears if type(one) in (nn.Linear, RowParallelLinear)]


def pack_linears(model: nn.Module, kernels: Kernels) -> None:
    """Replace the linear layers of a frozen model with packed ones, if those are faster."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for name, linear in linears.items() if kernels.are_packed else ():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, PackedLinear(linear, kernels))


def has_packed_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for this dtype on this CPU; bfloat16 needs CPU instructions for it."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> Tensor:
    """Copy a weight into oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
