"""Attention of few queries to a cache, in one call of a compiled kernel.

torch's kernel for CPUs is made for long sequences, and a verify pass has a handful of queries per head. A query's
result has the same bits alone and among others, and hidden slots add nothing to it, as long as they hold finite
numbers.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from moray.targets.kernels.compiled import CompiledKernels
from moray.targets.kernels.kinds import are_stock_kernels_wanted

_DTYPES = (torch.float32, torch.bfloat16)
MAX_NEW = 24
"""Maximum number of queries per head: with more, torch's kernel, which multiplies blocks, is as fast or faster."""


class AttentionSizes(ctypes.Structure):
    """`AttentionSizes` of attention.h: sizes, and the strides of queries, keys, values and mask."""

    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            *("batch", "kv_heads", "group", "new_tokens", "slots", "head_dim"),
            *("query_batch", "query_head", "query_token", "key_batch", "key_head", "key_slot"),
            *("value_batch", "value_head", "value_slot", "mask_batch", "mask_token"),
        )
    ]


class CompiledAttention:
    """Scaled dot-product attention by the compiled kernels, for queries, keys and values of one dtype."""

    def __init__(self, kernels: CompiledKernels) -> None:
        self._kernels = kernels
        self._functions = {dtype: kernels.function("attention", dtype) for dtype in _DTYPES}

    def can_compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """Whether the kernel may compute these and is made for them: few queries of float32 or bfloat16, and heads of
        whole vectors."""
        new, head_dim = query.shape[2:]
        if (
            are_stock_kernels_wanted()
            or new > MAX_NEW
            or query.dtype not in _DTYPES
            or not fits_kernel(self._kernels, head_dim)
        ):
            return False
        tensors = (query, key, value) if mask is None else (query, key, value, mask)
        return all(one.dtype == query.dtype and one.stride(-1) == 1 for one in tensors)

    def __call__(
        self,
        query: Float[Tensor, "batch heads new head_dim"],
        key: Float[Tensor, "batch kv_heads slots head_dim"],
        value: Float[Tensor, "batch kv_heads slots head_dim"],
        mask: Float[Tensor, "#batch 1 #new slots"] | None,
        scale: float,
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Attention of query heads to the key/value head that their group shares; the mask is added to the scores."""
        batch, heads, new, head_dim = query.shape
        kv_heads, slots = key.shape[1], key.shape[2]
        assert key.shape == value.shape == (batch, kv_heads, slots, head_dim), "keys and values differ in shape"
        assert heads % kv_heads == 0, f"{heads} query heads cannot share {kv_heads} heads of keys and values"
        strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides(mask, batch, new, slots)
        sizes = AttentionSizes(batch, kv_heads, heads // kv_heads, new, slots, head_dim, *strides)
        out = query.new_empty(batch, new, heads, head_dim)
        scores = query.new_empty(self._kernels.num_scores(slots), dtype=torch.float32)
        self._functions[query.dtype](
            ctypes.addressof(sizes),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if mask is None else mask.data_ptr(),
            out.data_ptr(),
            scores.data_ptr(),
            scale,
            torch.get_num_threads(),
        )
        return out.transpose(1, 2)


def fits_kernel(kernels: CompiledKernels, head_dim: int) -> bool:
    """Whether heads of this size are whole vectors, and not too large."""
    return head_dim % kernels.lanes == 0 and head_dim <= kernels.max_head


def mask_strides(mask: Tensor | None, batch: int, new: int, slots: int) -> tuple[int, int]:
    """Strides of a mask's rows, 0 where all share one."""
    if mask is None:
        return 0, 0
    given, heads, rows, seen = mask.shape
    fits = given in (1, batch) and heads == 1 and rows in (1, new) and seen == slots
    assert fits, f"a mask of {tuple(mask.shape)} does not fit {batch} sequences of {new} queries and {slots} slots"
    return (0 if given == 1 else mask.stride(0)), (0 if rows == 1 else mask.stride(2))
