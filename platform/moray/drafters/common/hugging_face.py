"""Decoder layers in the layout of Hugging Face's Llama: names of tensors, and the order of rotated rows.

A rotary embedding turns pairs of a head's features. Ours are neighbours, 2k and 2k + 1; those of Hugging Face are k and
k + head_dim / 2. So the rows of query and key projections change their order between the two, and nothing else does.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from moray.drafters.common.decoder_layers import SelfAttentionLayer

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


def layer_state(
    read: Callable[[str], Tensor], head_dim: int, *, has_input_norm: bool = True
) -> dict[str, Float[Tensor, "*any"]]:
    """The state dict of our `SelfAttentionLayer` from the weights of one of Hugging Face's layers.

    Args:
        read: gives a tensor by its name in `LAYER_TENSORS`.
        head_dim: width of a head.
        has_input_norm: False for a layer without one.
    """
    query, key = (from_halves(read(f"self_attn.{name}_proj.weight"), head_dim) for name in "qk")
    state = {
        "attention.qkv_proj.weight": torch.cat([query, key, read("self_attn.v_proj.weight")]),
        "attention.o_proj.weight": read("self_attn.o_proj.weight"),
        "mlp_norm.weight": read("post_attention_layernorm.weight"),
        "mlp.gate_up.weight": torch.cat([read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")]),
        "mlp.down.weight": read("mlp.down_proj.weight"),
    }
    return state | ({"input_norm.weight": read("input_layernorm.weight")} if has_input_norm else {})


def cross_layer_state(read: Callable[[str], Tensor], head_dim: int) -> dict[str, Float[Tensor, "*any"]]:
    """As `layer_state`, for our `CrossAttentionLayer`: queries apart from keys and values."""
    state = layer_state(read, head_dim)
    qkv, num_rows = state.pop("attention.qkv_proj.weight"), len(read("self_attn.q_proj.weight"))
    return state | {"attention.q_proj.weight": qkv[:num_rows], "attention.kv_proj.weight": qkv[num_rows:]}


@torch.no_grad()
def layer_tensors(layer: SelfAttentionLayer) -> dict[str, Tensor]:
    """A layer's weights by their names in `LAYER_TENSORS`: the reverse of `layer_state`."""
    attention, mlp = layer.attention, layer.mlp
    rows = [count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads)]
    query, key, value = attention.qkv_proj.weight.split([rows[0], rows[1], rows[1]])
    gate, up = mlp.gate_up.weight.chunk(2)
    tensors = {
        "self_attn.q_proj.weight": to_halves(query, attention.head_dim),
        "self_attn.k_proj.weight": to_halves(key, attention.head_dim),
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


def from_halves(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Rows in our order, from those of Hugging Face."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_halves(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Rows in the order of Hugging Face, from ours."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
