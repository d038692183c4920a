"""Decoder layers in the layout of Hugging Face's Llama: names of tensors, and the order of rotated rows.

A rotary embedding turns pairs of a head's features. Ours are neighbours, 2k and 2k + 1; those of Hugging Face are k and
k + head_dim / 2. So the rows of query and key projections change their order between the two, and nothing else does.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from moray.drafters.common.layers import SelfAttentionLayer

LAYER_TENSORS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""All tensors of a layer without biases and without norms of queries and keys."""


@torch.no_grad()
def fill_layer(layer: SelfAttentionLayer, read: Callable[[str], Tensor]) -> None:
    """Give a layer the weights of one of Hugging Face's.

    Args:
        layer: of the same sizes; without an input norm, that tensor is not read.
        read: gives a tensor by its name in `LAYER_TENSORS`.
    """
    attention, mlp = layer.attention, layer.mlp
    query, key = (_neighbours(read(f"self_attn.{name}_proj.weight"), attention.head_dim) for name in "qk")
    attention.qkv_proj.weight.copy_(torch.cat([query, key, read("self_attn.v_proj.weight")]))
    attention.o_proj.weight.copy_(read("self_attn.o_proj.weight"))
    mlp.gate_up.weight.copy_(torch.cat([read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")]))
    mlp.down.weight.copy_(read("mlp.down_proj.weight"))
    layer.mlp_norm.weight.copy_(read("post_attention_layernorm.weight"))
    if isinstance(layer.input_norm, torch.nn.RMSNorm):
        layer.input_norm.weight.copy_(read("input_layernorm.weight"))


@torch.no_grad()
def layer_tensors(layer: SelfAttentionLayer) -> Mapping[str, Tensor]:
    """A layer's weights by their names in `LAYER_TENSORS`: what `fill_layer` reads."""
    attention, mlp = layer.attention, layer.mlp
    rows = [count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads)]
    query, key, value = attention.qkv_proj.weight.split([rows[0], rows[1], rows[1]])
    gate, up = mlp.gate_up.weight.chunk(2)
    tensors = {
        "self_attn.q_proj.weight": _halves(query, attention.head_dim),
        "self_attn.k_proj.weight": _halves(key, attention.head_dim),
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": attention.o_proj.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": mlp.down.weight,
    }
    if isinstance(layer.input_norm, torch.nn.RMSNorm):
        tensors["input_layernorm.weight"] = layer.input_norm.weight
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _neighbours(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Rows in our order, from those of Hugging Face."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _halves(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Rows in the order of Hugging Face, from ours."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
