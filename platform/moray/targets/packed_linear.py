"""Linear layers on a CPU whose weights are packed once for oneDNN's kernels.

On a CPU, `F.linear` hands its weight to a BLAS that packs it again in each call, which costs more than the products for
the few rows of a verify pass. Here the weight is packed at load. The plain weight is kept too: for few rows, for which
BLAS reads the weight without packing it, for gradients, for torch.compile and for baselines (`stock_kernels`).

What is faster depends on the CPU and its BLAS, so it is measured at load, on the model's own weights, as passes read
them: joined (see `targets.fused_layer`) and in huge pages. Models whose weights stay in cache are left as they are:
they gain little, and results stay the same in every process. For a larger model another process may choose other
kernels, and its results may then differ in the last bits.

Weights whose results need not be exact, those of a drafter, may also be rounded to bfloat16: half the bytes to read.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from moray.targets.huge_pages import move_to_huge_pages
from moray.targets.parallel.linear import RowParallelLinear

_MIN_BYTES = 16 << 20
"""Total size of all weights below which nothing is packed."""
_TRIED_BYTES = 128 << 20
"""Maximum bytes of weights that are measured: more than a core's own cache holds, as in a real pass."""
_ROWS = (1, 2, 4, 17)
"""Row counts that are measured: a plain step, the shortest draft, a short chain, a tree."""
_HINT = 64
"""Row count for which oneDNN picks the layout; layouts for 4 to 64 rows are equally fast at any row count."""
_REPEATS = 9
"""How often packed and plain weights are timed for each row count."""
_MAX_SECONDS = 2.0
"""On a busy machine, timing for one row count stops after this time, once both have run twice."""
_GAIN = 1.05
"""Packed weights are used from the first row count at which they are this many times as fast as torch's, if torch's are
this many times as fast at no higher one. Smaller differences are noise."""
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far packed weights' results may be from torch's, as a share of their norm, by dtype. Another order of summing
makes a tenth of this; products in a smaller format, which oneDNN may be told to use, make more."""


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


@dataclass(frozen=True)
class Kernels:
    """Which kernels are faster for some weights."""

    packed_from: int | None
    """Smallest number of rows for which packed weights are used; None for never."""
    reason: str
    """One line for the log; empty for small models, for which nothing is measured."""
    dtype: torch.dtype | None = None
    """Dtype that packed weights are rounded to; None for no rounding."""

    @property
    def are_packed(self) -> bool:
        """Whether packed weights are used at all."""
        return self.packed_from is not None


PLAIN = Kernels(None, "")
"""Torch's own, without a measurement."""


class PackedWeight:
    """A weight and, if the kernels need one, its packed copy."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], kernels: Kernels) -> None:
        self.weight, self._dtype = weight, kernels.dtype or weight.dtype
        self._packed_from = kernels.packed_from
        self._packed = None if kernels.packed_from is None else _pack(weight.to(self._dtype))

    def linear(
        self, x: Float[Tensor, "*batch inputs"], bias: Float[Tensor, " outputs"] | None = None
    ) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias."""
        if self._packed_from is None or self._packed is None or x.numel() < self._packed_from * x.shape[-1]:
            return F.linear(x, self.weight, bias)
        if _SWITCH.is_stock or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.linear(x, self.weight, bias)
        rounded = None if bias is None else bias.to(self._dtype)
        return _packed_linear(x.to(self._dtype), self._packed, rounded).to(x.dtype)


class PackedLinear(nn.Module):
    """An `nn.Linear` with a packed copy of its weight, and the same parameters."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.pack(kernels)

    def pack(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._both = PackedWeight(self.weight.detach(), kernels)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias."""
        if self.weight.data_ptr() != self._both.weight.data_ptr():  # the weight was replaced since it was packed
            return F.linear(x, self.weight, self.bias)
        return self._both.linear(x, self.bias)


def linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights of a model's plain and row-parallel linear layers."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [one.weight.detach() for one in linears if type(one) in (nn.Linear, RowParallelLinear)]


@torch.inference_mode()
def choose_kernels(weights: Sequence[Tensor], *, may_round: bool = False, num_processes: int = 1) -> Kernels:
    """Measure which kernels are faster for these weights on this CPU, with the current number of threads.

    Packed weights are used from the row count on at which they are faster (see `_GAIN`).
    With `may_round`, float32 weights are rounded to bfloat16 if that is faster still. Each of
    `num_processes` processes on this machine packs this many weights.
    """
    if stay_in_cache(weights):
        return PLAIN
    if not all(_are_kernels_there(dtype) for dtype in {weight.dtype for weight in weights}):
        return _stock("there are no packed ones for this CPU and number format")
    if shortage := memory_shortage(weights, num_processes):
        return _stock(shortage)
    gains, difference = _measure(weights)
    if difference > _ROUNDING[weights[0].dtype]:
        return _stock(f"results of packed ones differ by {difference:.1e} of their norm, which is more than rounding")
    if may_round and {weight.dtype for weight in weights} == {torch.float32} and _are_kernels_there(torch.bfloat16):
        rounded, _ = _measure(weights, torch.bfloat16)
        if all(gain >= _GAIN * max(gains[rows], 1.0) for rows, gain in rounded.items()):
            reason = f"packed weights in bfloat16, {_said(rounded)} as torch's in float32"
            return Kernels(1, f"linear layers: {reason}", torch.bfloat16)
    said, packed_from = _said(gains), _first_gain(gains)
    if packed_from is None:
        return _stock(f"packed ones would be {said}")
    which = "packed weights"
    if packed_from > 1:
        which += f" for {packed_from} rows and more, torch's own kernels for fewer"
    return Kernels(packed_from, f"linear layers: {which}; packed ones are {said}")


def stay_in_cache(weights: Sequence[Tensor]) -> bool:
    """Whether weights are so small that a CPU keeps them in its cache; nothing is measured for them."""
    return _num_bytes(weights) < _MIN_BYTES


def memory_shortage(weights: Sequence[Tensor], num_processes: int = 1) -> str:
    """Why there is too little memory for copies of these weights in so many processes; empty if there is enough."""
    free, taken = _free_bytes(), _num_bytes(weights) * num_processes
    if 2 * taken <= free:
        return ""
    return f"copies of them take {taken >> 20} MiB, more than half of the {free >> 20} MiB that are free"


def _num_bytes(weights: Sequence[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


def _first_gain(gains: Mapping[int, float]) -> int | None:
    """The first row count at which packed weights are faster, and slower at none above it."""
    for rows, gain in gains.items():
        if gain >= _GAIN and min(after for more, after in gains.items() if more >= rows) >= 1 / _GAIN:
            return rows
    return None


def pack_linears(model: nn.Module, kernels: Kernels) -> None:
    """Replace the linear layers of a frozen model with packed ones, if those are faster."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for name, linear in linears.items() if kernels.are_packed else ():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, PackedLinear(linear, kernels))


def _said(gains: Mapping[int, float]) -> str:
    """For example "0.86, 0.79, 1.49 and 1.36 times as fast with 1, 2, 4 and 17 rows"."""

    def listed(items: list[str]) -> str:
        return f"{', '.join(items[:-1])} and {items[-1]}"

    return f"{listed([f'{gain:.2f}' for gain in gains.values()])} times as fast with {listed([*map(str, gains)])} rows"


def _stock(reason: str) -> Kernels:
    return Kernels(None, f"linear layers: torch's own kernels, because {reason}")


def _measure(weights: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[dict[int, float], float]:
    """Compare some of the weights, packed and rounded to `dtype`, with torch's kernels, all in huge pages.

    Returns:
        How many times as fast they are, by row count; and the largest difference of their results, as a share of the
        results' norm.
    """
    tried: list[Tensor] = []
    for weight in weights:
        if tried and sum(one.nbytes for one in tried) + weight.nbytes > _TRIED_BYTES:
            break
        tried.append(weight)
    packed = [PackedWeight(weight, Kernels(1, "", dtype)) for weight in tried]
    move_to_huge_pages(max_seconds=2.0)
    gains: dict[int, float] = {}
    difference = 0.0
    for rows in _ROWS:
        inputs = [torch.randn(rows, weight.shape[1]).to(weight.dtype) for weight in tried]
        plain, ours = _seconds(
            [partial(F.linear, x, weight) for x, weight in zip(inputs, tried, strict=True)],
            [partial(weight.linear, x) for x, weight in zip(inputs, packed, strict=True)],
        )
        gains[rows] = plain / ours
        for x, weight, ours_packed in zip(inputs, tried, packed, strict=True):
            expected = F.linear(x, weight).double()
            error = float((ours_packed.linear(x).double() - expected).norm() / expected.norm())
            difference = max(difference, error)
    return gains, difference


def _are_kernels_there(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for this dtype on this CPU; bfloat16 needs CPU instructions for it."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _seconds(*runs: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each run: the shortest time of each of its products, added up.

    Runs alternate. A product takes about a millisecond, so in several turns each is likely to be timed once without
    other work beside it; a whole run is not.
    """
    shortest = [[float("inf")] * len(run) for run in runs]
    end = time.perf_counter() + _MAX_SECONDS
    for turn in range(_REPEATS):
        if turn > 1 and time.perf_counter() > end:
            break
        for run, best in zip(runs, shortest, strict=True):
            for index, product in enumerate(run):
                begin = time.perf_counter()
                product()
                best[index] = min(best[index], time.perf_counter() - begin)
    return [sum(best) for best in shortest]


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _HINT)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _free_bytes() -> int:
    """Memory that is available on this machine."""
    import psutil

    return int(psutil.virtual_memory().available)
