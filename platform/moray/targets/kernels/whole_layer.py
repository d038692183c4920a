"""A whole decoder layer in one call of a compiled kernel: what is before attention, attention to a cache, to which new
keys and values are written, and what is after it.

The parts in calls of their own (see `layer` and `attention`) give the same bits, and take 6 to 31 % longer in a pass of
few tokens, because of what Python does between them.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from moray.targets.kernels.attention import MAX_NEW, AttentionSizes, fits_kernel, mask_strides
from moray.targets.kernels.compiled import CompiledKernels
from moray.targets.kernels.layer import AfterAttention, BeforeAttention
from moray.targets.kv_cache import Places


class WholeLayer:
    """A layer whose parts before and after attention are compiled, with heads that the attention kernel is made for."""

    def __init__(
        self, kernels: CompiledKernels, before: BeforeAttention, after: AfterAttention, num_heads: int, scale: float
    ) -> None:
        """
        Args:
            kernels: the kernels that compute.
            before: the part before attention.
            after: the part after it.
            num_heads: number of query heads.
            scale: what attention multiplies its scores by.
        """
        self._parts = before, after
        self._before, self._after = before.pointers, after.pointers
        self._num_heads, self._head_dim, self._scale, self.dtype = num_heads, before.head_dim, scale, after.dtype
        self._kernels = kernels
        self._numbers = before.scratch + after.scratch + 2 * num_heads * before.head_dim
        self._function = kernels.function("layer", after.dtype)

    @classmethod
    def from_parts(
        cls,
        kernels: CompiledKernels,
        before: BeforeAttention | None,
        after: AfterAttention | None,
        num_heads: int,
        scale: float,
    ) -> "WholeLayer | None":
        """None if a part is not compiled, or the attention kernel is not made for heads of this size."""
        if before is None or after is None or not fits_kernel(kernels, before.head_dim):
            return None
        return cls(kernels, before, after, num_heads, scale)

    def can_compute(self, hidden: Tensor, places: Places, mask: Tensor | None) -> bool:
        """Whether the kernel is made for so few tokens, and for this cache and mask; without a mask there must be a
        single new token, which sees every slot."""
        if hidden.shape[1] > (1 if mask is None else MAX_NEW) or places.key.dtype != self.dtype:
            return False
        return mask is None or (mask.dtype == self.dtype and mask.stride(-1) == 1)

    def __call__(
        self,
        hidden: Float[Tensor, "batch new hidden"],
        rotation: tuple[Tensor, Tensor],
        places: Places,
        mask: Float[Tensor, "#batch 1 #new seen"] | None,
    ) -> Float[Tensor, "batch new hidden"]:
        """The layer's output. Cosines and sines are [batch, new, head_dim]; the mask is added to attention's scores."""
        batch, new, _ = hidden.shape
        key, value, seen = places.key, places.value, places.num_seen
        kv_heads, head_dim, heads = key.shape[1], self._head_dim, self._num_heads
        assert key.shape[0] == value.shape[0] == batch, f"{key.shape[0]} rows of a cache for {batch} sequences"
        assert places.slots is None or places.slots.shape == (batch, new), "slots of other tokens"
        assert places.slots is not None or places.begin + new <= key.shape[2], "the cache is full"
        assert seen <= key.shape[2], f"{seen} slots of {key.shape[2]}"
        assert hidden.dtype == rotation[0].dtype == self.dtype, f"{hidden.dtype} was given to a kernel for {self.dtype}"
        hidden, cosines, sines = hidden.contiguous(), rotation[0].contiguous(), rotation[1].contiguous()
        slots = None if places.slots is None else places.slots.contiguous()
        sizes = AttentionSizes(
            *(batch, kv_heads, heads // kv_heads, new, seen, head_dim),
            *(new * heads * head_dim, head_dim, heads * head_dim),  # queries lie row by row
            *key.stride()[:3],
            *value.stride()[:3],
            *mask_strides(mask, batch, new, seen),
        )
        out = torch.empty_like(hidden)
        size = batch * new * self._numbers + self._kernels.num_scores(seen)
        scratch = hidden.new_empty(size, dtype=torch.float32)
        self._function(
            ctypes.addressof(self._before),
            ctypes.addressof(self._after),
            ctypes.addressof(sizes),
            hidden.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if slots is None else slots.data_ptr(),
            places.begin,
            None if mask is None else mask.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            self._scale,
            torch.get_num_threads(),
        )
        return out
