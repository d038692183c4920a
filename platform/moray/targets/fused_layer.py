"""The forward pass of decoder layers on a CPU, in fewer and larger operations than transformers' own.

A pass over few tokens is so short that the number of operations matters. transformers computes a layer in about sixty
operations, seven of them products with a weight. Here queries, keys and values are one product, as are the MLP's gate
and up projections, and norms and rotations take half the operations. Where Moray's own kernels are used (see
`targets.kernels`), a pass of few tokens takes one operation a layer. The results equal those of transformers up to
rounding.

Weights are joined in place: the modules' own weights become views of the joined ones, so nothing is stored twice. The
joined ones are copies, not pages of the model's file, so that they can lie in huge pages. The layer's own forward pass
still works. It is used under `stock_kernels`, with gradients, under torch.compile, and when transformers itself runs
the model. Weights must not be replaced once they are joined.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from moray.targets.attention import grouped_attention
from moray.targets.kernels.attention import CompiledAttention
from moray.targets.kernels.compiled import CompiledWeight, loaded_kernels
from moray.targets.kernels.kinds import PLAIN, Kernels, are_stock_kernels_wanted
from moray.targets.kernels.layer import AfterAttention, BeforeAttention
from moray.targets.kernels.weights import PackedWeight
from moray.targets.kernels.whole_layer import WholeLayer
from moray.targets.parallel.linear import RowParallelLinear
from moray.targets.rotary import Rotation
from moray.targets.visibility import Visible


def fuse_layers(model: Any) -> list[Tensor]:
    """Make every decoder layer of a frozen model compute in joined operations; returns the weights that these read."""
    for layer in model.model.layers:
        layer.forward = FusedLayer(layer)
    return [joined.weight for layer in model.model.layers for joined in layer.forward.products]


def pack_layers(model: Any, kernels: Kernels) -> None:
    """Let fused layers compute with these kernels."""
    for layer in model.model.layers:
        layer.forward.pack(kernels)


class FusedLayer:
    """The forward pass of one layer of the families llama, mistral, qwen2 and qwen3."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._stock = layer.forward
        self._attention, self._mlp = attention, mlp
        self._layer_number: int = attention.layer_idx
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._num_kv_heads: int = attention.k_proj.out_features // attention.head_dim
        self._num_heads: int = attention.q_proj.out_features // attention.head_dim
        self._qkv = _Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = _Joined([attention.o_proj])
        self._gate_up = _Joined([mlp.gate_proj, mlp.up_proj])
        self._down = _Joined([mlp.down_proj])
        self.products = (self._qkv, self._out, self._gate_up, self._down)
        self._activation = mlp.act_fn
        self._input_norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)
        self._head_norm = _head_norm(attention, self._num_heads, self._num_kv_heads)
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._compiled_up_to = 0
        self._before: BeforeAttention | None = None
        self._attention_kernel: CompiledAttention | None = None
        self._after: AfterAttention | None = None
        self._whole: WholeLayer | None = None

    def pack(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        for joined in self.products:
            joined.pack(kernels)
        self._compiled_up_to = kernels.compiled_up_to
        self._before = self._compiled_before() if kernels.compiled_up_to else None
        self._attention_kernel = CompiledAttention(loaded_kernels()) if kernels.compiled_up_to else None
        self._after = self._compiled_after() if kernels.compiled_up_to else None
        self._whole = None
        if kernels.compiled_up_to:
            parts = self._before, self._after, self._num_heads, self._scaling
            self._whole = WholeLayer.from_parts(loaded_kernels(), *parts)

    def __call__(
        self,
        hidden_states: Float[Tensor, "batch new hidden"],
        attention_mask: Any = None,
        position_ids: Int[Tensor, "batch new"] | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Rotation | tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Float[Tensor, "batch new hidden"]:
        """The layer's output; takes the arguments of transformers' layers."""
        if not isinstance(position_embeddings, Rotation) or past_key_values is None or are_stock_kernels_wanted():
            return self._stock(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **others,
            )
        batch, new, _ = hidden_states.shape
        whole = self._in_one_call(hidden_states, position_embeddings, past_key_values, attention_mask)
        if whole is not None:
            return whole
        query, key, value = self._heads(hidden_states, position_embeddings)
        key, value = past_key_values.update(key, value, self._layer_number)
        attended, _ = grouped_attention(
            self._attention, query, key, value, attention_mask, self._scaling, self._attention_kernel
        )
        return self._output(hidden_states, attended.reshape(batch, new, -1))

    def _in_one_call(
        self, hidden_states: Tensor, rotation: Rotation, cache: Any, mask: Tensor | Visible | None
    ) -> Tensor | None:
        """The layer's output if one compiled kernel computes it, which also writes to the cache."""
        batch, new, _ = hidden_states.shape
        if self._whole is None or batch * new > self._compiled_up_to or len(rotation[0]) != batch:
            return None
        find = getattr(cache, "places", None)
        if find is None or isinstance(mask, Visible) or self._mlp._compiled_call_impl is not None:
            return None
        places = find(self._layer_number, new)
        if places is None or not self._whole.can_compute(hidden_states, places, mask):
            return None
        return self._whole(hidden_states, rotation, places, mask)

    def _heads(self, hidden_states: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """Queries, keys and values, [batch, heads, new, head_dim] each; the first two rotated."""
        batch, new, _ = hidden_states.shape
        if self._before is not None and batch * new <= self._compiled_up_to and len(rotation[0]) == batch:
            heads = self._before(hidden_states, rotation)
            return heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
        heads = self._qkv(self._input_norm(hidden_states)).view(batch, new, -1, self._head_dim).transpose(1, 2)
        turned, value = heads.split((self._num_heads + self._num_kv_heads, self._num_kv_heads), dim=1)
        if self._head_norm is not None:
            turned = self._head_norm(turned)
        return *rotation.turn(turned).split((self._num_heads, self._num_kv_heads), dim=1), value

    def _output(self, hidden_states: Tensor, attended: Float[Tensor, "batch new inner"]) -> Tensor:
        """The layer's output, from its input and what attention gives."""
        is_mlp_compiled = self._mlp._compiled_call_impl is not None  # by torch
        batch, new, _ = hidden_states.shape
        if self._after is not None and batch * new <= self._compiled_up_to and not is_mlp_compiled:
            return self._after(attended, hidden_states)
        hidden = hidden_states + self._out(attended)
        if is_mlp_compiled:
            return hidden + self._mlp(self._mlp_norm(hidden))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate).mul_(up))

    def _compiled_before(self) -> BeforeAttention | None:
        qkv, norm = self._qkv.compiled, self._norms[0]
        if qkv is None or self._head_norm is not None or self._head_dim % 2:
            return None
        num_rotated = self._num_heads + self._num_kv_heads
        weight, epsilon = norm.weight.data, norm.variance_epsilon
        return BeforeAttention(loaded_kernels(), weight, epsilon, qkv, self._qkv.bias, num_rotated, self._head_dim)

    def _compiled_after(self) -> AfterAttention | None:
        parts, norm = (self._out, self._gate_up, self._down), self._norms[1]
        out, gate_up, down = (part.compiled for part in parts)
        if out is None or gate_up is None or down is None or any(part.sums_ranks for part in parts):
            return None
        if not isinstance(self._activation, nn.SiLU | SiLUActivation):
            return None
        biases = (self._out.bias, self._gate_up.bias, self._down.bias)
        weights = (out, gate_up, down)
        return AfterAttention(loaded_kernels(), norm.weight.data, norm.variance_epsilon, weights, biases)


class _Joined:
    """Linear layers with the same input, as one product."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.weight = torch.cat([linear.weight.data for linear in linears])
        for linear, own in zip(linears, self.weight.split([linear.out_features for linear in linears]), strict=True):
            linear.weight.data = own
        self.pack(PLAIN)
        self._sum = linears[0].sum_ranks if isinstance(linears[0], RowParallelLinear) else None
        biases = [self.weight.new_zeros(one.out_features) if one.bias is None else one.bias.data for one in linears]
        self.bias = None if all(one.bias is None for one in linears) else torch.cat(biases)

    def pack(self, kernels: Kernels) -> None:
        """Compute with these kernels from now on."""
        self._packed = PackedWeight(self.weight, kernels)

    @property
    def compiled(self) -> CompiledWeight | None:
        """The copy that Moray's own kernels read, if they are used."""
        return self._packed.compiled

    @property
    def sums_ranks(self) -> bool:
        """Whether the results of several processes are added up."""
        return self._sum is not None

    def __call__(self, x: Tensor) -> Tensor:
        out = self._packed.linear(x, self.bias)
        return out if self._sum is None else self._sum(out)


class _Norm:
    """RMSNorm with half the operations of transformers' own."""

    def __init__(self, norm: Any, weight: Tensor | None = None) -> None:
        width = norm.weight.shape[-1]
        self._scale = (norm.weight.data if weight is None else weight).float() * width**0.5
        self._floor = torch.tensor((width * norm.variance_epsilon) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / length.hypot_(self._floor)).mul_(self._scale).to(x.dtype)


def _head_norm(attention: Any, num_heads: int, num_kv_heads: int) -> _Norm | None:
    """The norm of each query and key head, which only qwen3 has."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
    weight = torch.cat([query.expand(num_heads, -1), key.expand(num_kv_heads, -1)])
    return _Norm(attention.q_norm, weight[:, None])
