"""The layer of layer self-attention: the mean over positions of a decoder layer's output, without a mask.

Its sequences are short (a token's layers) and there is one per token, so for many tokens it is written for few passes
over memory: the norms' weights are folded into the projections, and everything linear is applied to the mean.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from moray.drafters.common.attention import attend
from moray.drafters.common.decoder_layers import DecoderLayer
from moray.drafters.common.layers import RMSNorm, Rotary, SelfAttention, SwiGLU, rotate
from moray.drafters.config_base import BlockConfig
from moray.drafters.moa.gated_mean import GatedMean
from moray.drafters.moa.layer_attention import LayerAttention

_FEW = 16
"""Up to this many sequences, where the number of operations matters more than the work, the layer is computed like any
other, by compiled kernels if there are any."""
_SHORT = 64
"""Up to this many positions, plain matrix products are faster than a CPU's fused attention, which is made for long
sequences."""
_MAX_SCORES = 1 << 21
"""Maximum number of attention scores computed at a time; in float32 they take 8 MiB."""


class PooledSelfAttentionLayer(DecoderLayer[SelfAttention]):
    """mean(h + mlp(norm(h))), where h = x + attention(norm(x))."""

    def __init__(self, width: int, config: BlockConfig, head_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width, norm_eps)
        self.attention = SelfAttention(width, config, head_dim)
        self.mlp_norm = RMSNorm(width, norm_eps)
        self.mlp = SwiGLU(width, config.intermediate_size)

    def forward(self, x: Float[Tensor, "batch seq width"], rotary: Rotary) -> Float[Tensor, "batch width"]:
        """All positions of `x` at once."""
        if x.shape[0] <= _FEW and self._after_for(x.shape[0] * x.shape[1]) is not None:
            return self._finish(x, self.attention(self.input_norm(x), rotary, None)).mean(dim=1)
        x = x + self._attention(x, rotary)
        # The MLP's last projection is linear, so it is applied to the mean: 1/seq of the work.
        gated = GatedMean.apply(self.mlp_norm.project(x, self.mlp.gate_up.weight))
        return x.mean(dim=1) + self.mlp.down(gated)

    def _attention(self, x: Float[Tensor, "batch seq width"], rotary: Rotary) -> Float[Tensor, "batch seq width"]:
        attention = self.attention
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        qkv = self.input_norm.project(x, attention.qkv_proj.weight)
        is_short = x.device.type == "cpu" and x.shape[1] <= _SHORT
        is_float, is_grouped = qkv.dtype == torch.float32, num_heads != num_kv_heads
        if is_short and is_float and not is_grouped:  # half precision has no complex numbers
            return attention.o_proj(LayerAttention.apply(qkv, rotary, num_heads))
        heads = qkv.unflatten(-1, (-1, attention.head_dim))
        turned, value = heads.transpose(1, 2).split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        query, key = rotate(turned, rotary).split([num_heads, num_kv_heads], dim=1)
        by_products = is_short and not is_float
        mixed = _attend_by_products(query, key, value) if by_products else attend(query, key, value, None)
        return attention.o_proj(mixed)


def _attend_by_products(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads seq head_dim"],
    value: Float[Tensor, "batch kv_heads seq head_dim"],
) -> Float[Tensor, "batch seq width"]:
    """Attention by plain products, for as many sequences at a time as keep their scores in the CPU's cache."""
    _, num_heads, seq, _ = query.shape
    size = max(1, _MAX_SCORES // (num_heads * seq * seq))
    parts = zip(query.split(size), key.split(size), value.split(size), strict=True)
    mixed = [_attend_to(*part) for part in parts]
    return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).transpose(1, 2).flatten(2)


def _attend_to(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads seq head_dim"],
    value: Float[Tensor, "batch kv_heads seq head_dim"],
) -> Float[Tensor, "batch heads seq head_dim"]:
    batch, num_heads, seq, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = (query * head_dim**-0.5).reshape(batch * num_kv_heads, num_heads // num_kv_heads * seq, head_dim)
    scores = grouped @ key.reshape(-1, seq, head_dim).transpose(1, 2)
    shares = scores.float().softmax(dim=-1).to(value.dtype)
    return (shares @ value.reshape(-1, seq, head_dim)).view(batch, num_heads, seq, head_dim)
