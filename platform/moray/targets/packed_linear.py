"""Linear layers of a CPU target whose weights are laid out once for oneDNN's kernels.

`F.linear` on a CPU hands its weight to a BLAS that packs it anew in each call, which for the few rows of a verify pass
costs more than the products. Here the weight is packed at load, and the module keeps the plain one beside it: for row
counts at which it is the faster one, for gradients, for torch.compile and for baselines (`stock_kernels`).

What is faster depends on the CPU and its BLAS, so it is measured at load, on the model's own weights. Models so small
that their weights stay in cache are left as they are: they gain little, and results stay the same in every process.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

_LEAST_BYTES = 32 << 20
"""Of all linear weights; below that nothing is packed."""
_TRIED_BYTES = 48 << 20
"""Of the weights that are measured: more than a cache holds, as in a real pass."""
_ROWS = (1, 4, 17)
"""Row counts that are measured: a plain step, a short chain, a tree."""
_HINT = 64
"""Row count for which oneDNN picks the layout; those from 4 to 64 are equally fast at any row count."""
_GAIN = 1.05
"""How much faster packed weights must be, so that noise does not decide."""
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class _Switch:
    """Whether all packed layers use the plain weight for now."""

    is_stock: bool = False


_SWITCH = _Switch()


class PackedLinear(nn.Module):
    """An `nn.Linear` with a packed copy of its weight."""

    def __init__(self, linear: nn.Linear, packed: Tensor, packs_one_row: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = packed
        self._packs_one_row = packs_one_row

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias."""
        is_packed = self._packs_one_row or x.numel() > self.in_features
        if not is_packed or _SWITCH.is_stock or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return _packed_linear(x, self._packed, self.bias)


@contextmanager
def stock_kernels() -> Iterator[None]:
    """Run `F.linear` in all packed layers, as any other program would; not for several threads at once."""
    _SWITCH.is_stock = True
    try:
        yield
    finally:
        _SWITCH.is_stock = False


@torch.inference_mode()
def pack_linears(model: nn.Module) -> str:
    """Replace a frozen CPU model's linear layers by packed ones where those are faster.

    Returns:
        What was chosen, and why, in one line.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    num_bytes = sum(linear.weight.nbytes for linear in linears.values())
    dtypes = {linear.weight.dtype for linear in linears.values()}
    if num_bytes < _LEAST_BYTES:
        return "linear layers: torch's own (a small model)"
    if not torch.backends.mkldnn.is_available() or not dtypes <= set(_DTYPES):
        return "linear layers: torch's own (no packed kernels for this CPU and number format)"
    free = _free_bytes()
    if 2 * num_bytes > free:
        return (
            f"linear layers: torch's own (packed copies take {num_bytes >> 20} MiB, more than half of the {free >> 20} "
            "MiB that are free)"
        )
    gains = _measure([linear.weight for linear in linears.values()])
    said = ", ".join(f"{rows}: {gain:.2f}" for rows, gain in gains.items())
    several = [gain for rows, gain in gains.items() if rows > 1]
    if min(several) < _GAIN:
        return f"linear layers: torch's own (packed weights are so many times as fast, by rows: {said})"
    for name, linear in linears.items():
        parent, _, last = name.rpartition(".")
        packed = PackedLinear(linear, _pack(linear.weight), gains[1] >= _GAIN)
        setattr(model.get_submodule(parent), last, packed)
    return f"linear layers: packed weights, so many times as fast as torch's own, by rows: {said}"


def _measure(weights: list[Tensor]) -> dict[int, float]:
    """How many times as fast some of the weights are when packed, by the number of rows."""
    tried: list[Tensor] = []
    for weight in weights:
        if tried and sum(one.nbytes for one in tried) + weight.nbytes > _TRIED_BYTES:
            break
        tried.append(weight)
    packed = [_pack(weight) for weight in tried]
    gains = {}
    for rows in _ROWS:
        inputs = {size: torch.randn(rows, size).to(tried[0].dtype) for size in {one.shape[1] for one in tried}}
        pairs = [(inputs[plain.shape[1]], plain, pack) for plain, pack in zip(tried, packed, strict=True)]
        gains[rows] = _seconds(lambda pairs=pairs: [F.linear(x, plain) for x, plain, _ in pairs]) / _seconds(
            lambda pairs=pairs: [_packed_linear(x, pack, None) for x, _, pack in pairs]
        )
    return gains


def _seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs."""
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _free_bytes() -> int:
    """Memory that a process may still take."""
    import psutil

    return int(psutil.virtual_memory().available)
