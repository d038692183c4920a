"""The parts of a decoder layer before and behind attention, each in one call of a compiled kernel.

Between two reads of its weights, a layer over few tokens does so little that the number of operations decides how long
it takes. Here everything but attention and the cache is two operations.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from moray.targets.kernels.compiled import BeforePointers, BehindPointers, CompiledKernels, CompiledWeight


class BeforeAttention:
    """RMSNorm, the projections to queries, keys and values, and rotation."""

    def __init__(
        self,
        kernels: CompiledKernels,
        norm: Float[Tensor, " hidden"],
        epsilon: float,
        qkv: CompiledWeight,
        bias: Tensor | None,
        num_turned: int,
        head_dim: int,
    ) -> None:
        """
        Args:
            kernels: the kernels that compute.
            norm: the norm's weight.
            epsilon: what the norm adds to the mean square.
            qkv: the projections, joined.
            bias: their biases, joined.
            num_turned: number of query and key heads, which are rotated.
            head_dim: size of a head.
        """
        self._kept = norm.float().contiguous(), None if bias is None else bias.float(), qkv
        weight, own_bias, _ = self._kept
        self._num_heads, self._head_dim, self._outputs = qkv.outputs // head_dim, head_dim, qkv.outputs
        self._sizes = BeforePointers(
            qkv.described(own_bias),
            weight.data_ptr(),
            epsilon,
            len(norm),
            num_turned,
            self._num_heads,
            head_dim,
        )
        self._function = kernels.function("before_attention", norm.dtype)

    def __call__(
        self, hidden: Float[Tensor, "batch new hidden"], rotation: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Queries and keys, both rotated by these cosines and sines [batch, new, head_dim], and values."""
        hidden = hidden.contiguous()
        batch, new, width = hidden.shape
        cosines, sines = rotation
        heads = hidden.new_empty(batch, self._num_heads, new, self._head_dim)
        scratch = hidden.new_empty(batch * new * (width + self._outputs), dtype=torch.float32)
        self._function(
            ctypes.addressof(self._sizes),
            hidden.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            heads.data_ptr(),
            scratch.data_ptr(),
            batch,
            new,
            torch.get_num_threads(),
        )
        return heads


class BehindAttention:
    """The output projection, RMSNorm and the MLP with SiLU, and both residual sums."""

    def __init__(
        self,
        kernels: CompiledKernels,
        norm: Float[Tensor, " hidden"],
        epsilon: float,
        weights: tuple[CompiledWeight, CompiledWeight, CompiledWeight],
        biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> None:
        """
        Args:
            kernels: the kernels that compute.
            norm: the weight of the norm in front of the MLP.
            epsilon: what the norm adds to the mean square.
            weights: the output projection, the gate and up projections joined, and the down projection.
            biases: theirs.
        """
        wide = [None if bias is None else bias.float() for bias in biases]
        self._kept = norm.float().contiguous(), wide, weights
        out, gate_up, down = (weight.described(bias) for weight, bias in zip(weights, wide, strict=True))
        self._scratch = 3 * len(norm) + 3 * (weights[1].outputs // 2)
        self._sizes = BehindPointers(
            out, gate_up, down, self._kept[0].data_ptr(), epsilon, len(norm), weights[1].outputs // 2
        )
        self._function = kernels.function("behind_attention", norm.dtype)

    def __call__(
        self, attended: Float[Tensor, "batch new inner"], hidden: Float[Tensor, "batch new hidden"]
    ) -> Float[Tensor, "batch new hidden"]:
        """The layer's output, from what attention gives and the layer's input."""
        attended, hidden = attended.contiguous(), hidden.contiguous()
        rows = hidden.numel() // hidden.shape[-1]
        out = torch.empty_like(hidden)
        scratch = hidden.new_empty(rows * self._scratch, dtype=torch.float32)
        self._function(
            ctypes.addressof(self._sizes),
            attended.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            rows,
            torch.get_num_threads(),
        )
        return out
