"""Which kernels compute linear layers fastest on this CPU.

That depends on the CPU and its BLAS, so it is measured at load, on the model's own weights, as passes read them:
joined (see `targets.fused_layer`) and in huge pages. Models whose weights stay in cache are left as they are: they
gain little, and results stay the same in every process. For a larger model another process may choose other kernels,
and its results may then differ in the last bits.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moray.targets.huge_pages import move_to_huge_pages
from moray.targets.kernels.build import UnavailableError
from moray.targets.kernels.compiled import load_kernels
from moray.targets.kernels.kinds import ALL_ROWS, PLAIN, Kernels
from moray.targets.kernels.weights import PackedWeight, has_packed_kernels

_MIN_BYTES = 16 << 20
"""Total size of all weights below which nothing is packed."""
_TRIED_BYTES = 128 << 20
"""Maximum bytes of weights that are measured: more than a core's own cache holds, as in a real pass."""
_ROWS = (1, 2, 4, 8, 17, 64, 512)
"""Row counts that are measured: a plain step, the shortest draft, chains, a tree, a short and a long prompt."""
_MANY = 64
"""Row count from which arithmetic takes longer than reading weights, so that few weights are measured."""
_TRIED_WITH_MANY = 16 << 20
"""Maximum bytes of weights that are measured with many rows."""
_REPEATS = 9
"""How often all kernels are timed for each row count."""
_MAX_SECONDS = 2.0
"""On a busy machine, timing for one row count stops after this time, once all have run twice."""
_MAX_NOISE = 1.35
"""How many times as long as its shortest time a product usually takes, above which nothing is concluded: other work
disturbs the timing. This is 1.1 to 1.2 on an idle machine, and 1.5 or more beside a program on both cores."""
_DRAFTED = 8
"""Row count of drafts."""
_COMPILED_WITH_AMX = _DRAFTED
"""Row count up to which compiled kernels are assumed to be faster than packed weights in bfloat16, if the CPU has a
unit for products of matrices (AMX). Not measured there yet."""
_COMPILED_WITHOUT_AMX = 64
"""The same elsewhere, and in float32: measured on CPUs without AMX."""
_USUALLY_PACKED = 4
"""Row count from which packed weights were faster than torch's kernels on every CPU so far."""
_GAIN = 1.05
"""Copies of weights are made if they make passes this many times as fast. Smaller differences are noise."""
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far results may be from torch's, as a share of their norm, by dtype. Another order of summing makes a tenth of
this; products in a smaller format, which oneDNN may be told to use, make more."""

Gains = dict[str, dict[int, float]]
"""How many times as fast as torch's a kind of kernels is, by row count."""


@torch.inference_mode()
def choose_kernels(weights: Sequence[Tensor], *, may_round: bool = False, num_processes: int = 1) -> Kernels:
    """Measure which kernels are faster for these weights on this CPU, with the current number of threads.

    Compiled ones are used for few rows and packed weights for many, as far as they are the fastest.
    With `may_round`, float32 weights are rounded to bfloat16 if that is faster still. Each of
    `num_processes` processes on this machine copies this many weights.
    """
    if stay_in_cache(weights):
        return PLAIN
    kinds, missing = _kinds_for(weights, weights[0].dtype)
    if not kinds:
        return _stock(f"there are no others for this CPU and number format{missing}")
    if shortage := memory_shortage(weights, num_processes):
        return _stock(shortage)
    has_memory_for_both = not memory_shortage(weights, 2 * num_processes)
    gains, differences, noise = _measure(weights, kinds)
    imprecise = {kind: error for kind, error in differences.items() if not error <= _ROUNDING[weights[0].dtype]}
    for kind, error in imprecise.items():
        missing += f"; results of {kind} ones differ by {error:.1e} of their norm, which is more than rounding"
        del gains[kind]
    if noise > _MAX_NOISE and gains:
        return _usual_kernels(weights[0].dtype, gains, noise, missing, has_memory_for_both)
    if may_round and weights[0].dtype == torch.float32 and (rounded := _rounded_kernels(weights, gains)) is not None:
        return rounded
    compiled_up_to = _compiled_up_to(gains, others=_best_of({**gains, "compiled": {}}))
    packed_from = _packed_from(gains, compiled_up_to)
    if compiled_up_to and packed_from is not None and not has_memory_for_both:
        packed_from, missing = None, f"{missing}; too little memory is free for packed weights beside them"
    if not compiled_up_to and packed_from is None:
        return _stock(f"no others are faster{_said(gains)}{missing}")
    which = _which(compiled_up_to, packed_from)
    return Kernels(packed_from, f"linear layers: {which}{_said(gains)}{missing}", None, compiled_up_to)


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


def _kinds_for(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[str], str]:
    """The kinds of kernels that can compute these weights in this dtype, and why there are no compiled ones."""
    kinds, missing = [], ""
    if dtype not in _ROUNDING or any(weight.dtype != weights[0].dtype for weight in weights):
        return kinds, missing
    kernels = load_kernels()
    if isinstance(kernels, UnavailableError):
        missing = f"; no compiled ones: {kernels}"
    elif all(kernels.can_compute(weight, dtype) for weight in weights):
        kinds.append("compiled")
    else:
        missing = "; no compiled ones: weights have an odd number of inputs"
    if has_packed_kernels(dtype):
        kinds.append("packed")
    return kinds, missing


def _rounded_kernels(weights: Sequence[Tensor], exact: Gains) -> Kernels | None:
    """Kernels that read float32 weights in bfloat16, if that is faster at every row count."""
    kinds, _ = _kinds_for(weights, torch.bfloat16)
    if not kinds:
        return None
    gains, _, noise = _measure(weights, kinds, torch.bfloat16)
    if noise > _MAX_NOISE:
        return None
    best, best_exact = _best_of(gains), _best_of(exact)
    if not all(gain >= _GAIN * max(best_exact.get(rows, 1.0), 1.0) for rows, gain in best.items()):
        return None
    compiled_up_to = _compiled_up_to(gains, others=gains.get("packed", {}))
    packed_from = None if compiled_up_to == ALL_ROWS else compiled_up_to + 1
    reason = f"linear layers: weights in bfloat16, {_which(compiled_up_to, packed_from)}{_said(gains, 'in float32')}"
    return Kernels(packed_from, reason, torch.bfloat16, compiled_up_to)


def _usual_kernels(dtype: torch.dtype, gains: Gains, noise: float, missing: str, has_memory_for_both: bool) -> Kernels:
    """What is usually the fastest, on a machine that is too busy to measure it."""
    has_unit = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    usually = _COMPILED_WITH_AMX if has_unit else _COMPILED_WITHOUT_AMX
    compiled_up_to = usually if "compiled" in gains else 0
    packed_from = None if "packed" not in gains else compiled_up_to + 1 if compiled_up_to else _USUALLY_PACKED
    if compiled_up_to and not has_memory_for_both:
        packed_from = None
    which = f"{_which(compiled_up_to, packed_from)}, as on most machines"
    busy = f"; other work disturbs the timing here, products take {noise:.1f} times their shortest time"
    return Kernels(packed_from, f"linear layers: {which}{busy}{missing}", None, compiled_up_to)


def _compiled_up_to(gains: Gains, others: Mapping[int, float]) -> int:
    """The largest row count up to which compiled kernels are the fastest; 0 if that gains nothing.

    The row counts of drafts are decided together, so that one disturbed measurement does not decide; larger ones follow
    one by one.
    """
    over = {rows: gain / max(others.get(rows, 1.0), 1.0) for rows, gain in gains.get("compiled", {}).items()}
    if not over or statistics.geometric_mean([over[rows] for rows in _ROWS if rows <= _DRAFTED]) < _GAIN:
        return 0
    slower = [rows for rows in _ROWS if rows > _DRAFTED and over[rows] < 1 / _GAIN]
    return max(rows for rows in _ROWS if rows < slower[0]) if slower else ALL_ROWS


def _packed_from(gains: Gains, compiled_up_to: int) -> int | None:
    """The smallest row count above those of the compiled kernels from which packed weights are the fastest."""
    packed = gains.get("packed", {})
    above = {rows: gain for rows, gain in packed.items() if rows > compiled_up_to}
    first = _first_gain(above)
    if first is None or not compiled_up_to:
        return first
    if first == min(above) and packed[compiled_up_to] >= _GAIN:
        return compiled_up_to + 1  # they beat torch's kernels at both ends of the gap
    return first


def _best_of(gains: Gains) -> dict[int, float]:
    """The highest gain at each row count."""
    return {rows: max(gain[rows] for gain in gains.values() if gain) for rows in _ROWS if any(gains.values())}


def _first_gain(gains: Mapping[int, float]) -> int | None:
    """The first row count at which packed weights are faster, and slower at none above it."""
    for rows, gain in gains.items():
        if gain >= _GAIN and min(after for more, after in gains.items() if more >= rows) >= 1 / _GAIN:
            return rows
    return None


def _which(compiled_up_to: int, packed_from: int | None) -> str:
    """For example "compiled kernels for up to 17 rows, packed weights for 18 rows and more"."""
    parts = []
    if compiled_up_to:
        parts.append("compiled kernels" + ("" if compiled_up_to == ALL_ROWS else f" for up to {compiled_up_to} rows"))
    if packed_from is not None:
        parts.append("packed weights" + (f" for {packed_from} rows and more" if packed_from > 1 else ""))
    if compiled_up_to < ALL_ROWS and packed_from != 1 and packed_from != compiled_up_to + 1:
        parts.append("torch's own for others")
    return ", ".join(parts)


def _said(gains: Gains, of_torch: str = "") -> str:
    """For example "; times as fast as torch's with 1 and 2 rows: compiled 2.50 and 2.61, packed 1.71 and 1.70"."""

    def listed(items: list[str]) -> str:
        return f"{', '.join(items[:-1])} and {items[-1]}"

    figures = [f"{kind} {listed([f'{gain:.2f}' for gain in by_rows.values()])}" for kind, by_rows in gains.items()]
    which = f"torch's {of_torch}".strip()
    return f"; times as fast as {which} with {listed([*map(str, _ROWS)])} rows: {'; '.join(figures)}" if figures else ""


def _stock(reason: str) -> Kernels:
    return Kernels(None, f"linear layers: torch's own kernels, because {reason}")


def _measure(
    weights: Sequence[Tensor], kinds: Sequence[str], dtype: torch.dtype | None = None
) -> tuple[Gains, dict[str, float], float]:
    """Compare kinds of kernels with torch's on some of the weights, rounded to `dtype` and in huge pages.

    Returns:
        The gains; the largest difference of each kind's results, as a share of the results' norm; and how many times
        as long as its shortest time a product usually takes.
    """
    tried = _first_bytes(weights, _TRIED_BYTES)
    copies = {kind: [PackedWeight(weight, _only(kind, dtype)) for weight in tried] for kind in kinds}
    move_to_huge_pages(max_seconds=2.0)
    gains: Gains = {kind: {} for kind in kinds}
    differences, noises = dict.fromkeys(kinds, 0.0), []
    for rows in _ROWS:
        if rows == _MANY:
            fewer = _first_bytes(tried, _TRIED_WITH_MANY)
            tried, copies = fewer, {kind: own[: len(fewer)] for kind, own in copies.items()}
        inputs = [torch.randn(rows, weight.shape[1]).to(weight.dtype) for weight in tried]
        (plain, *others), noise = _seconds(
            [partial(F.linear, x, weight) for x, weight in zip(inputs, tried, strict=True)],
            *[[partial(one.linear, x) for x, one in zip(inputs, own, strict=True)] for own in copies.values()],
        )
        noises.append(noise)
        for kind, seconds in zip(kinds, others, strict=True):
            gains[kind][rows] = plain / seconds
        for x, weight, *own in zip(inputs, tried, *copies.values(), strict=True):
            expected = F.linear(x, weight).double()
            for kind, one in zip(kinds, own, strict=True):
                error = float((one.linear(x).double() - expected).norm() / expected.norm())
                differences[kind] = max(differences[kind], error if math.isfinite(error) else math.inf)
    return gains, differences, statistics.median(noises)


def _first_bytes(weights: Sequence[Tensor], most: int) -> list[Tensor]:
    """The first weights of together at most so many bytes; at least one."""
    found = [weights[0]]
    for weight in weights[1:]:
        if _num_bytes(found) + weight.nbytes > most:
            break
        found.append(weight)
    return found


def _only(kind: str, dtype: torch.dtype | None) -> Kernels:
    """This kind of kernels for any number of rows."""
    if kind == "compiled":
        return Kernels(None, "", dtype, compiled_up_to=ALL_ROWS)
    return Kernels(1, "", dtype)


def _seconds(*runs: Sequence[Callable[[], object]]) -> tuple[list[float], float]:
    """Seconds of each run: the shortest time of each of its products, added up; and the median times over the shortest.

    Runs alternate. A product takes about a millisecond, so in several turns each is likely to be timed once without
    other work beside it; a whole run is not.
    """
    times: list[list[list[float]]] = [[[] for _ in run] for run in runs]
    end = time.perf_counter() + _MAX_SECONDS
    for turn in range(_REPEATS):
        if turn > 1 and time.perf_counter() > end:
            break
        for run, own in zip(runs, times, strict=True):
            for product, taken in zip(run, own, strict=True):
                begin = time.perf_counter()
                product()
                taken.append(time.perf_counter() - begin)
    shortest = [sum(map(min, own)) for own in times]
    return shortest, sum(statistics.median(taken) for own in times for taken in own) / sum(shortest)


def _free_bytes() -> int:
    """Memory that is available on this machine."""
    import psutil

    return int(psutil.virtual_memory().available)
