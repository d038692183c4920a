"""Building blocks of drafters: rotary tables, norms, attention that can reach its keys and values, SwiGLU blocks.

Unlike in a library's decoder layer, the caller owns keys and values: training has them for all positions at once,
drafting keeps them in preallocated buffers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from moray.drafters.common.attention import KVBuffer, Mask, Reach, attend, attend_each, attend_within
from moray.drafters.common.direction import Direction
from moray.drafters.config_base import BlockConfig
from moray.targets.kernels.attention import CompiledAttention
from moray.targets.kernels.compiled import loaded_kernels
from moray.targets.kernels.kinds import Kernels
from moray.targets.visibility import Visible

Rotary = Complex[Tensor, "#seq half"]
"""Unit complex numbers that rotate pairs of neighbouring features, for some positions."""

KeysValues = tuple[Float[Tensor, "batch kv_heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]
"""Keys (rotated) and values of all positions of training sequences."""


class RotaryTable(nn.Module):
    """Rotations for positions 0..num_positions-1, computed once and never saved."""

    def __init__(self, head_dim: int, num_positions: int, theta: float) -> None:
        super().__init__()
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
        # Kept as pairs of reals: `module.to(dtype)` would drop the imaginary part of a complex buffer.
        self.pairs: Tensor
        self.register_buffer("pairs", torch.stack([angle.cos(), angle.sin()], dim=-1).float(), persistent=False)

    def rows(self, start: int, end: int) -> Rotary:
        """Rotations of positions start..end-1, as a view."""
        return torch.view_as_complex(self.pairs[start:end])

    def at(self, positions: Int[Tensor, " seq"]) -> Rotary:
        """Rotations of arbitrary positions."""
        return torch.view_as_complex(self.pairs[positions])


def rotate(x: Float[Tensor, "batch heads seq head_dim"], rotary: Rotary) -> Float[Tensor, "batch heads seq head_dim"]:
    """Rotary position embedding (arXiv 2104.09864) on neighbouring pairs, as one complex product."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv 1910.07467); on CPUs with fewer operations than torch's own, in half the time."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)
        self._root_width = width**0.5
        self._floor = nn.Buffer(torch.tensor((width * eps) ** 0.5), persistent=False)

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any width"]:
        if x.device.type != "cpu":
            return super().forward(x)
        # Divide first: a large x times its weight may overflow half precision.
        return self._direction(x) * self._scale

    def project(
        self, x: Float[Tensor, "*any width"], weight: Float[Tensor, "rows width"]
    ) -> Float[Tensor, "*any rows"]:
        """A linear map of the normalised `x`. For many rows of `x`, applying the norm's weight to the map's weight is
        cheaper."""
        if x.device.type != "cpu":
            return F.linear(super().forward(x), weight)
        return F.linear(self._direction(x), weight * self._scale)

    @property
    def _scale(self) -> Float[Tensor, " width"]:
        return self.weight * self._root_width

    def _direction(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any width"]:
        if x.requires_grad and x.dtype == torch.float32:
            return Direction.apply(x, self._floor)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor)).to(x.dtype)


class Attention(nn.Module):
    """Attention whose results are the heads side by side: `o_proj` is left to the layer, which may compute it together
    with what follows."""

    o_proj: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.kernel: CompiledAttention | None = None
        """The kernel that computes few queries, if there is one."""

    def pack(self, kernels: Kernels) -> None:
        """Draft with these kernels from now on."""
        self.kernel = CompiledAttention(loaded_kernels()) if kernels.compiled_up_to else None


class SelfAttention(Attention):
    """Grouped-query self-attention: over whole sequences in training, over a cache while drafting."""

    def __init__(self, width: int, config: BlockConfig, head_dim: int, out_width: int | None = None) -> None:
        """`out_width` is that of `o_proj`'s output; None for `width`."""
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.qkv_proj = nn.Linear(width, (config.num_heads + 2 * config.num_kv_heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width if out_width is None else out_width, bias=False)

    def forward(
        self,
        normed: Float[Tensor, "batch seq width"],
        rotary: Rotary,
        mask: Mask,
    ) -> Float[Tensor, "batch seq inner"]:
        """All positions at once."""
        query, key, value = self._heads_of(normed, rotary)
        return attend(query, key, value, mask, self.kernel)

    def unroll(
        self, normed: Float[Tensor, "batch seq width"], rotary: Rotary, earlier: Sequence[KeysValues], mask: Mask
    ) -> tuple[Float[Tensor, "batch seq inner"], KeysValues]:
        """All positions at once, over the keys and values of earlier steps and of this step, which are returned."""
        query, key, value = self._heads_of(normed, rotary)
        keys, values = zip(*earlier, (key, value), strict=True)
        return attend(query, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask), (key, value)

    def _heads_of(
        self, normed: Float[Tensor, "batch seq width"], rotary: Rotary
    ) -> tuple[
        Float[Tensor, "batch heads seq head_dim"],
        Float[Tensor, "batch kv_heads seq head_dim"],
        Float[Tensor, "batch kv_heads seq head_dim"],
    ]:
        heads = _heads(self.qkv_proj(normed), self.head_dim)
        # Split instead of slicing: gradients of slices are padded with zeros and added up.
        turned, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        query, key = rotate(turned, rotary).split([self.num_heads, self.num_kv_heads], dim=1)
        return query, key, value

    def remember(self, normed: Float[Tensor, "1 new width"], rotary: Rotary, cache: KVBuffer, start: int) -> None:
        """Write the keys and values of new positions to a cache, from slot `start` on."""
        rows = self.num_heads * self.head_dim  # skip the queries, which are not needed
        heads = _heads(F.linear(normed, self.qkv_proj.weight[rows:]), self.head_dim)
        end = start + normed.shape[1]
        cache[0, :, :, start:end] = rotate(heads[:, : self.num_kv_heads], rotary)
        cache[1, :, :, start:end] = heads[:, self.num_kv_heads :]

    def draft(
        self, normed: Float[Tensor, "1 rows width"], rotary: Rotary, reaches: Sequence[Reach]
    ) -> Float[Tensor, "1 rest inner"]:
        """New positions of several sequences, concatenated, each over its sequence's cache."""
        heads = _heads(self.qkv_proj(normed), self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = rotate(heads[:, :num_rotated], rotary)
        query, key, value = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        return attend_within(query, key, value, reaches, self.kernel)


class CrossAttention(Attention):
    """Grouped-query attention to keys and values that the caller computes, keeps and passes in."""

    def __init__(self, width: int, config: BlockConfig, head_dim: int) -> None:
        super().__init__()
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(width, 2 * config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)

    def split(
        self, kv: Float[Tensor, "batch seq kv_width"], rotary: Rotary
    ) -> tuple[Float[Tensor, "batch kv_heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        """Split the output of `kv_proj` into rotated keys and plain values."""
        heads = _heads(kv, self.head_dim)
        return rotate(heads[:, : self.num_kv_heads], rotary), heads[:, self.num_kv_heads :]

    def forward(
        self,
        normed: Float[Tensor, "batch seq width"],
        rotary: Rotary,
        key: Float[Tensor, "batch kv_heads slots head_dim"],
        value: Float[Tensor, "batch kv_heads slots head_dim"],
        mask: Visible | None,
    ) -> Float[Tensor, "batch seq inner"]:
        """Attention of the positions of `normed`, rotated by `rotary`, to the given keys and values."""
        return attend(self._query(normed, rotary), key, value, mask)

    def draft(
        self,
        normed: Float[Tensor, "1 rows width"],
        rotary: Rotary,
        memories: Sequence[Float[Tensor, "2 1 kv_heads _ head_dim"]],
    ) -> Float[Tensor, "1 rows inner"]:
        """New positions of several sequences, the same number for each, over all of their sequence's memory."""
        return attend_each(self._query(normed, rotary), memories, self.kernel)

    def _query(
        self, normed: Float[Tensor, "batch seq width"], rotary: Rotary
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        return rotate(_heads(self.q_proj(normed), self.head_dim), rotary)


def _heads(x: Float[Tensor, "batch seq width"], head_dim: int) -> Float[Tensor, "batch heads seq head_dim"]:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated MLP (arXiv 2002.05202)."""

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, width, bias=False)

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any width"]:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def init_weights(module: nn.Module, norm_init: str) -> None:
    """Initialise linears from N(0, 0.02), biases to zero, norms to one (or N(0, 0.02), see `LayeredBase.norm_init`)."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.RMSNorm) and norm_init == "normal":
            nn.init.normal_(part.weight, std=0.02)
