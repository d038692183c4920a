"""Building blocks of drafters: rotary tables, attention with its keys and values in reach, SwiGLU blocks.

Unlike a library's decoder layer, a block here lets its caller own keys and values: training has them for all
positions at once, drafting keeps them in preallocated buffers.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from moray.drafters.configs import BlockConfig

Rotary = Complex[Tensor, "#seq half"]
"""Unit complex numbers by which pairs of neighbouring features turn, for some positions."""


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
        """Rotations of positions start..end-1: a view, no copy."""
        return torch.view_as_complex(self.pairs[start:end])


def rotate(x: Float[Tensor, "batch heads seq head_dim"], rotary: Rotary) -> Float[Tensor, "batch heads seq head_dim"]:
    """Rotary position embedding (arXiv 2104.09864) on neighbouring pairs: one complex product."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values the caller computes, keeps and hands back."""

    def __init__(self, width: int, config: BlockConfig, head_dim: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(width, 2 * config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)

    def query(self, x: Float[Tensor, "batch seq width"], rotary: Rotary) -> Float[Tensor, "batch heads seq head_dim"]:
        """Rotated queries."""
        batch, seq, _ = x.shape
        return rotate(self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim).transpose(1, 2), rotary)

    def split(
        self, kv: Float[Tensor, "batch seq kv_width"], rotary: Rotary
    ) -> tuple[Float[Tensor, "batch kv_heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        """Rotated keys and plain values out of what `kv_proj` gave."""
        batch, seq, _ = kv.shape
        key, value = kv.view(batch, seq, 2, self.num_kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return rotate(key, rotary), value

    def attend(
        self,
        query: Float[Tensor, "batch heads seq head_dim"],
        key: Float[Tensor, "batch kv_heads slots head_dim"],
        value: Float[Tensor, "batch kv_heads slots head_dim"],
        mask: Bool[Tensor, "#batch 1 seq slots"] | Float[Tensor, "#batch 1 seq slots"] | None,
    ) -> Float[Tensor, "batch seq width"]:
        """Attention output after the output projection."""
        grouped = self.num_heads != self.num_kv_heads
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
        batch, _, seq, _ = out.shape
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))

    def forward(
        self, normed: Float[Tensor, "batch seq width"], rotary: Rotary, mask: Bool[Tensor, "#batch 1 seq seq"] | None
    ) -> Float[Tensor, "batch seq width"]:
        """Self-attention over all positions at once."""
        key, value = self.split(self.kv_proj(normed), rotary)
        return self.attend(self.query(normed, rotary), key, value, mask)

    def remember(
        self,
        normed: Float[Tensor, "1 new width"],
        rotary: Rotary,
        cache: Float[Tensor, "2 1 kv_heads slots head_dim"],
        start: int,
    ) -> None:
        """Write keys and values of new positions into a cache's slots from `start` on."""
        key, value = self.split(self.kv_proj(normed), rotary)
        end = start + normed.shape[1]
        cache[0, :, :, start:end] = key
        cache[1, :, :, start:end] = value

    def draft(
        self,
        normed: Float[Tensor, "1 new width"],
        rotary: Rotary,
        cache: Float[Tensor, "2 1 kv_heads slots head_dim"],
        start: int,
        mask: Float[Tensor, "1 1 new seen"] | None,
    ) -> Float[Tensor, "1 new width"]:
        """Self-attention of new positions over the cache, in which their own slots begin at `start`."""
        self.remember(normed, rotary, cache, start)
        key, value = cache[..., : start + normed.shape[1], :]
        return self.attend(self.query(normed, rotary), key, value, mask)


class SwiGLU(nn.Module):
    """Gated MLP (arXiv 2002.05202)."""

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, width, bias=False)

    def forward(self, x: Float[Tensor, "*any width"]) -> Float[Tensor, "*any width"]:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Taken apart, so that self-attention, cross-attention and cached drafting use the same weights through the
    same code: `input_norm` and the attention first, then `finish`.
    """

    def __init__(
        self, width: int, config: BlockConfig, head_dim: int, norm_eps: float, has_input_norm: bool = True
    ) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width, eps=norm_eps) if has_input_norm else nn.Identity()
        self.attention = Attention(width, config, head_dim)
        self.mlp_norm = nn.RMSNorm(width, eps=norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def finish(
        self, x: Float[Tensor, "batch seq width"], attended: Float[Tensor, "batch seq width"]
    ) -> Float[Tensor, "batch seq width"]:
        """The layer's output for the residual stream `x` and what attention made of it."""
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))

    def forward(
        self, x: Float[Tensor, "batch seq width"], mask: Bool[Tensor, "#batch 1 seq seq"] | None, rotary: Rotary
    ) -> Float[Tensor, "batch seq width"]:
        """Self-attention over all of `x`."""
        return self.finish(x, self.attention(self.input_norm(x), rotary, mask))

    def draft(
        self,
        x: Float[Tensor, "1 new width"],
        rotary: Rotary,
        cache: Float[Tensor, "2 1 kv_heads slots head_dim"],
        start: int,
        mask: Float[Tensor, "1 1 new seen"] | None,
    ) -> Float[Tensor, "1 new width"]:
        """New positions over a cache (see `Attention.draft`)."""
        return self.finish(x, self.attention.draft(self.input_norm(x), rotary, cache, start, mask))


def init_weights(module: nn.Module, norm_init: str, generator: torch.Generator | None = None) -> None:
    """Linears from N(0, 0.02), biases zero, norms at one (or N(0, 0.02), see `NormedConfig.norm_init`)."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.RMSNorm) and norm_init == "normal":
            nn.init.normal_(part.weight, std=0.02, generator=generator)


def causal_mask(seq: int, device: torch.device) -> Bool[Tensor, "1 1 seq seq"]:
    """What a position sees: itself and those before it."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).tril()[None, None]


def block_mask(
    start: Int[Tensor, "batch seq"], hide_before_start: Bool[Tensor, " batch"] | None = None
) -> tuple[Bool[Tensor, "batch 1 seq seq"], Bool[Tensor, "batch 1 seq seq"]]:
    """Masks of T-step bounded training (MoA, section 3.2) from start(i), the last verified position <= i.

    Returns:
        own: what a position's self-attention sees: j <= i; with `hide_before_start` only start(i) < j <= i
            (and i itself), the staircase.
        memory: what its cross-attention sees: j <= start(i).
    """
    seq = start.shape[1]
    column = torch.arange(seq, device=start.device)
    row = column[:, None]
    own = (column <= row).expand(start.shape[0], seq, seq)
    if hide_before_start is not None:
        near = (column > start[:, :, None]) | (column == row)
        own = own & (near | ~hide_before_start[:, None, None])
    memory = column <= start[:, :, None]
    return own[:, None], memory[:, None]
