"""Decoder layers of drafters: attention, then an MLP, each added to what came in.

Training runs them over whole sequences. Drafting runs them over caches, with compiled kernels where these are used.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from moray.drafters.common.attention import KVBuffer, Mask, Reach, without_known
from moray.drafters.common.layers import (
    Attention,
    CrossAttention,
    KeysValues,
    RMSNorm,
    Rotary,
    SelfAttention,
    SwiGLU,
)
from moray.drafters.config_base import BlockConfig
from moray.targets.kernels.kinds import Kernels, are_stock_kernels_wanted
from moray.targets.kernels.layer import AfterAttention
from moray.targets.visibility import Visible

AttentionT = TypeVar("AttentionT", bound=Attention)


class DecoderLayer(nn.Module, Generic[AttentionT]):
    """Pre-norm decoder layer: x + o_proj(attention(norm(x))), then x + mlp(norm(x))."""

    attention: AttentionT
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def __init__(self) -> None:
        super().__init__()
        self._after: AfterAttention | None = None
        self._compiled_up_to = 0

    def pack(self, kernels: Kernels) -> None:
        """Draft with these kernels from now on: what follows attention is one operation. Its linear layers are packed
        already, and no weight may change afterwards."""
        linears = (self.attention.o_proj, self.mlp.gate_up, self.mlp.down)
        self._after = AfterAttention.from_packed(linears, self.mlp_norm.weight.detach(), self.mlp_norm.eps or 0.0)
        self._compiled_up_to = kernels.compiled_up_to

    def _finish(
        self, x: Float[Tensor, "batch seq width"], attended: Float[Tensor, "batch seq inner"]
    ) -> Float[Tensor, "batch seq width"]:
        if (after := self._after_for(x.shape[0] * x.shape[1])) is not None:
            return after(attended.to(after.dtype), x.to(after.dtype)).to(x.dtype)
        x = x + self.attention.o_proj(attended)
        return x + self.mlp(self.mlp_norm(x))

    def _after_for(self, num_rows: int) -> AfterAttention | None:
        """The operation that computes what follows attention for so many rows, if there is one."""
        is_compiled_by_torch = self.mlp._compiled_call_impl is not None or self.mlp_norm._compiled_call_impl is not None
        if num_rows > self._compiled_up_to or is_compiled_by_torch or are_stock_kernels_wanted():
            return None
        return self._after


class _PreNormLayer(DecoderLayer[AttentionT]):
    """With one norm in front of attention, if any."""

    def __init__(self, width: int, config: BlockConfig, norm_eps: float, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width, norm_eps) if has_input_norm else nn.Identity()
        self.mlp_norm = RMSNorm(width, norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)


class SelfAttentionLayer(_PreNormLayer[SelfAttention]):
    """A decoder layer: over whole sequences in training, over a cache while drafting."""

    def __init__(
        self, width: int, config: BlockConfig, head_dim: int, norm_eps: float, has_input_norm: bool = True
    ) -> None:
        super().__init__(width, config, norm_eps, has_input_norm)
        self.attention = SelfAttention(width, config, head_dim)

    def forward(
        self,
        x: Float[Tensor, "batch seq width"],
        rotary: Rotary,
        mask: Mask,
    ) -> Float[Tensor, "batch seq width"]:
        """All positions of `x` at once."""
        return self._finish(x, self.attention(self.input_norm(x), rotary, mask))

    def unroll(
        self, x: Float[Tensor, "batch seq width"], rotary: Rotary, earlier: Sequence[KeysValues], mask: Mask
    ) -> tuple[Float[Tensor, "batch seq width"], KeysValues]:
        """All positions in one of several draft steps; also returns its keys and values (see
        `SelfAttention.unroll`)."""
        attended, own = self.attention.unroll(self.input_norm(x), rotary, earlier, mask)
        return self._finish(x, attended), own

    def remember(self, x: Float[Tensor, "1 new width"], rotary: Rotary, cache: KVBuffer, start: int) -> None:
        """Write only the keys and values of new positions (see `SelfAttention.remember`)."""
        self.attention.remember(self.input_norm(x), rotary, cache, start)

    def draft(
        self, x: Float[Tensor, "1 rows width"], rotary: Rotary, reaches: Sequence[Reach]
    ) -> Float[Tensor, "1 rest width"]:
        """New positions of several sequences over their caches, without those that are known already."""
        attended = self.attention.draft(self.input_norm(x), rotary, reaches)
        return self._finish(without_known(x, reaches), attended)


class CrossAttentionLayer(_PreNormLayer[CrossAttention]):
    """A decoder layer whose attention reads a memory: keys and values that `memorise` computed once."""

    def __init__(self, width: int, config: BlockConfig, head_dim: int, norm_eps: float) -> None:
        super().__init__(width, config, norm_eps)
        self.attention = CrossAttention(width, config, head_dim)

    def memorise(self, memory: Float[Tensor, "batch seq width"]) -> Float[Tensor, "batch seq kv_width"]:
        """Keys and values of memory vectors, not yet rotated; uses the same input norm as the queries."""
        return self.attention.kv_proj(self.input_norm(memory))

    def forward(
        self,
        x: Float[Tensor, "batch seq width"],
        rotary: Rotary,
        key: Float[Tensor, "batch kv_heads slots head_dim"],
        value: Float[Tensor, "batch kv_heads slots head_dim"],
        mask: Visible | None,
    ) -> Float[Tensor, "batch seq width"]:
        """The layer's output for `x`, given the memory's keys and values."""
        return self._finish(x, self.attention(self.input_norm(x), rotary, key, value, mask))

    def draft(
        self,
        x: Float[Tensor, "1 rows width"],
        rotary: Rotary,
        memories: Sequence[Float[Tensor, "2 1 kv_heads _ head_dim"]],
    ) -> Float[Tensor, "1 rows width"]:
        """The layer's output for rows of several sequences (see `CrossAttention.draft`)."""
        return self._finish(x, self.attention.draft(self.input_norm(x), rotary, memories))
