"""The parts of a decoder layer before and after attention, each in one call of a compiled kernel.

Over few tokens, everything in a layer but its products is so short that starting the operations takes longer than
computing them. Here everything but attention and the cache is two operations.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moray.targets.kernels.compiled import (
    AfterPointers,
    BeforePointers,
    CompiledKernels,
    CompiledWeight,
    loaded_kernels,
)
from moray.targets.kernels.weights import PackedLinear


class BeforeAttention:
    """RMSNorm, the projections to queries, keys and values, and rotation."""

    def __init__(
        self,
        kernels: CompiledKernels,
        norm: Float[Tensor, " hidden"],
        epsilon: float,
        qkv: CompiledWeight,
        bias: Tensor | None,
        num_rotated: int,
        head_dim: int,
    ) -> None:
        """
        Args:
            kernels: the kernels that compute.
            norm: the norm's weight.
            epsilon: what the norm adds to the mean square.
            qkv: the projections, joined.
            bias: their biases, joined.
            num_rotated: number of query and key heads, which are rotated.
            head_dim: size of a head.
        """
        self._kept = norm.float().contiguous(), None if bias is None else bias.float(), qkv
        weight, own_bias, _ = self._kept
        self._num_heads, self.head_dim = qkv.outputs // head_dim, head_dim
        self.scratch = qkv.outputs + len(norm)
        """Numbers that it keeps for each row meanwhile."""
        self.pointers = BeforePointers(
            qkv.pointers(own_bias),
            weight.data_ptr(),
            epsilon,
            len(norm),
            num_rotated,
            self._num_heads,
            head_dim,
        )
        self._function = kernels.function("before_attention", qkv.dtype)
        self._dtype = qkv.dtype

    def __call__(
        self, hidden: Float[Tensor, "batch new hidden"], rotation: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Queries and keys, both rotated by these cosines and sines [batch, new, head_dim], and values."""
        batch, new, _ = hidden.shape
        for one, shape in ((hidden, hidden.shape), *((one, (batch, new, self.head_dim)) for one in rotation)):
            _check(one, self._dtype, shape)
        hidden, cosines, sines = hidden.contiguous(), rotation[0].contiguous(), rotation[1].contiguous()
        heads = hidden.new_empty(batch, self._num_heads, new, self.head_dim)
        scratch = hidden.new_empty(batch * new * self.scratch, dtype=torch.float32)
        self._function(
            ctypes.addressof(self.pointers),
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


class AfterAttention:
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
        out, gate_up, down = (weight.pointers(bias) for weight, bias in zip(weights, wide, strict=True))
        self.scratch = 3 * len(norm) + 3 * (weights[1].outputs // 2)
        """Numbers that it keeps for each row meanwhile."""
        self.pointers = AfterPointers(
            out, gate_up, down, self._kept[0].data_ptr(), epsilon, len(norm), weights[1].outputs // 2
        )
        self._function = kernels.function("after_attention", weights[0].dtype)
        self._widths = weights[0].inputs, len(norm)
        self.dtype = weights[0].dtype
        """Dtype of its inputs and its output."""

    @classmethod
    def from_packed(
        cls, linears: tuple[nn.Module, nn.Module, nn.Module], norm: Float[Tensor, " hidden"], epsilon: float
    ) -> "AfterAttention | None":
        """From the output projection, the gate and up projections joined, and the down projection; None if these are no
        packed layers with compiled weights."""
        packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
        found = [(linear.compiled, linear.bias) for linear in packed if linear.compiled is not None]
        if len(found) < len(linears):
            return None
        (out, *_), (gate_up, *_), (down, *_) = found
        biases = [bias for _, bias in found]
        return cls(loaded_kernels(), norm, epsilon, (out, gate_up, down), (biases[0], biases[1], biases[2]))

    def __call__(
        self, attended: Float[Tensor, "batch new inner"], hidden: Float[Tensor, "batch new hidden"]
    ) -> Float[Tensor, "batch new hidden"]:
        """The layer's output, from what attention gives and the layer's input."""
        rows = hidden.shape[:-1]
        _check(attended, self.dtype, (*rows, self._widths[0]))
        _check(hidden, self.dtype, (*rows, self._widths[1]))
        attended, hidden = attended.contiguous(), hidden.contiguous()
        out = torch.empty_like(hidden)
        scratch = hidden.new_empty(rows.numel() * self.scratch, dtype=torch.float32)
        self._function(
            ctypes.addressof(self.pointers),
            attended.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            rows.numel(),
            torch.get_num_threads(),
        )
        return out


def _check(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The kernels read memory as they are told to, so that a mistake would give numbers and no error."""
    assert x.dtype == dtype, f"{x.dtype} was given to a kernel for {dtype}"
    assert x.shape == shape, f"{tuple(x.shape)} was given to a kernel for {tuple(shape)}"
