"""Moray's own kernels for few rows (`kernels.cpp`): linear layers, attention, and decoder layers.

A plain step or a verify pass reads every weight once, so memory limits its speed. torch's and oneDNN's kernels reach
about half of that limit; these read each weight in one stream per thread and reach it. They need g++ and Linux; where
they cannot be compiled (see `build`), other kernels compute.
"""

import ctypes
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from moray.targets.kernels.build import UnavailableError, load_library

_WORD_BYTES = 4
"""What is multiplied at once: one float32 or two bfloat16."""
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class WeightPointers(ctypes.Structure):
    """`Weight` of linear.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_long),
        ("steps", ctypes.c_long),
    ]


class BeforePointers(ctypes.Structure):
    """`Before` of layer.h."""

    _fields_ = [
        ("qkv", WeightPointers),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("hidden", ctypes.c_long),
        ("num_rotated", ctypes.c_long),
        ("num_heads", ctypes.c_long),
        ("head_dim", ctypes.c_long),
    ]


class AfterPointers(ctypes.Structure):
    """`After` of layer.h."""

    _fields_ = [
        ("out", WeightPointers),
        ("gate_up", WeightPointers),
        ("down", WeightPointers),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("hidden", ctypes.c_long),
        ("intermediate", ctypes.c_long),
    ]


class CompiledKernels:
    """The kernels of a library that was loaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.block: int = library.moray_block()
        """Outputs of a block, by which weights are packed."""
        self.lanes: int = library.moray_lanes()
        """Numbers of a vector, of which a head's size must be a multiple for attention."""
        self.max_head: int = library.moray_max_head()
        """The largest head for attention."""
        self._max_queries: int = library.moray_max_queries()
        pointer, count, threads = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self._functions = {
            (name, dtype): getattr(library, f"moray_{name}_{suffix}")
            for name in ("linear", "before_attention", "attention", "after_attention", "layer")
            for dtype, suffix in _SUFFIXES.items()
        }
        for (name, _), function in self._functions.items():
            function.restype = None
            function.argtypes = {
                "linear": [*3 * [pointer], count, threads],
                "before_attention": [*6 * [pointer], count, count, threads],
                "attention": [*7 * [pointer], ctypes.c_float, threads],
                "after_attention": [*5 * [pointer], count, threads],
                "layer": [*9 * [pointer], count, *3 * [pointer], ctypes.c_float, threads],
            }[name]

    def can_compute(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for this weight in `dtype`: float32 or bfloat16, with whole words in a row."""
        return dtype in _SUFFIXES and weight.shape[1] * dtype.itemsize % _WORD_BYTES == 0

    def num_scores(self, slots: int) -> int:
        """Floats of scratch that attention over so many slots needs, with the current number of threads."""
        return torch.get_num_threads() * self._max_queries * (-(-slots // self.lanes) * self.lanes)

    def function(self, name: str, dtype: torch.dtype) -> "ctypes._FuncPointer":
        """One of the library's functions, for one number format."""
        return self._functions[name, dtype]


class CompiledWeight:
    """A copy of a weight in blocks of outputs, zeros after the last one."""

    def __init__(self, kernels: CompiledKernels, weight: Float[Tensor, "outputs inputs"]) -> None:
        outputs, inputs = weight.shape
        self.outputs, self.inputs, self.dtype = outputs, inputs, weight.dtype
        per_word = _WORD_BYTES // weight.element_size()
        self._steps = inputs // per_word
        blocks = -(-outputs // kernels.block)
        padded = weight.new_zeros(blocks * kernels.block, inputs)
        padded[:outputs] = weight
        self._packed = padded.view(blocks, kernels.block, self._steps, per_word).transpose(1, 2).contiguous()
        self._function = kernels.function("linear", weight.dtype)
        self._without_bias = self.pointers(None)

    def pointers(self, bias: Float[Tensor, " outputs"] | None) -> WeightPointers:
        """What the library's functions take; `bias` is in float32, and the caller keeps it."""
        address = None if bias is None else bias.data_ptr()
        return WeightPointers(self._packed.data_ptr(), address, self.outputs, self._steps)

    def linear(
        self, x: Float[Tensor, "*batch inputs"], bias: Float[Tensor, " outputs"] | None = None
    ) -> Float[Tensor, "*batch outputs"]:
        """x weight^T + bias, summed in float32 and rounded once, for x of the weight's dtype."""
        bias = None if bias is None else bias.float()
        weight = self._without_bias if bias is None else self.pointers(bias)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        rows = x.numel() // x.shape[-1]
        self._function(ctypes.addressof(weight), x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads())
        return out


@cache
def load_kernels() -> CompiledKernels | UnavailableError:
    """Load the kernels, compiled at the first call on this machine; or why there are none. Never raises."""
    try:
        return CompiledKernels(load_library())
    except UnavailableError as error:
        return error


def loaded_kernels() -> CompiledKernels:
    """The kernels of this machine.

    Raises:
        UnavailableError: there are none; `load_kernels` returns the reason.
    """
    kernels = load_kernels()
    if isinstance(kernels, UnavailableError):
        raise UnavailableError(str(kernels))
    return kernels
