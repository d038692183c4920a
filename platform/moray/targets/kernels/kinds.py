"""Which kernels compute linear layers, and the switch that makes all of them torch's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

ALL_ROWS = 1 << 62
"""For `Kernels.compiled_up_to`: any number of rows."""


@dataclass
class _Switch:
    """Whether plain weights are currently used everywhere."""

    is_stock: bool = False


_SWITCH = _Switch()


@contextmanager
def stock_kernels() -> Iterator[None]:
    """Compute with plain weights inside the block, as any other program would; not thread-safe."""
    _SWITCH.is_stock = True
    try:
        yield
    finally:
        _SWITCH.is_stock = False


def is_stock() -> bool:
    """Whether plain weights are currently requested."""
    return _SWITCH.is_stock


def are_stock_kernels_wanted() -> bool:
    """Whether only torch's own kernels may compute: under `stock_kernels`, with gradients, and for torch.compile."""
    return is_stock() or torch.is_grad_enabled() or torch.compiler.is_compiling()


@dataclass(frozen=True)
class Kernels:
    """Which kernels are fastest for some weights. As the number of rows grows: compiled ones, torch's own, oneDNN's
    with packed weights; any of the three may be missing."""

    packed_from: int | None
    """Smallest number of rows for which weights packed for oneDNN are used, above `compiled_up_to`; None for never."""
    reason: str
    """One line for the log; empty for small models, for which nothing is measured."""
    dtype: torch.dtype | None = None
    """Dtype that packed and compiled weights are rounded to; None for no rounding."""
    compiled_up_to: int = 0
    """Largest number of rows for which compiled kernels are used; 0 for never."""

    @property
    def are_packed(self) -> bool:
        """Whether any copies of the weights are used."""
        return self.packed_from is not None or self.compiled_up_to > 0


PLAIN = Kernels(None, "")
"""Torch's own, without a measurement."""
