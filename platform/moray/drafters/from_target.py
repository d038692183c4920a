"""Layers that start from the target's own: the same sizes, the same weights, another rotation.

Drafters turn neighbouring features against each other where the target turns the first half of a head against the
second, so the rows of its query and key projections change places.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from moray.drafters.layers import CrossAttentionLayer, SelfAttentionLayer
from moray.errors import ConfigError
from moray.targets.spec import TargetSpec

Read = Callable[[str], Tensor | None]
"""read(name): a tensor of the target by its name; None if it has none of that name."""


@torch.no_grad()
def start_from(
    layers: Sequence[SelfAttentionLayer | CrossAttentionLayer], numbers: Sequence[int], spec: TargetSpec, read: Read
) -> None:
    """Copy weights of the target's layers into a drafter's; what a layer has and the target's has not stays random.

    Args:
        layers: of the drafter. Of cross-attention the keys and values stay random, for they read no hidden state.
        numbers: the target's layer for each; negative ones count from the last.
        spec: of the target.
        read: gives the target's tensors.

    Raises:
        ConfigError: there is no such layer, or its sizes are others.
    """
    if len(numbers) != len(layers):
        raise ConfigError(
            f"drafter.init_layers is {list(numbers)}; this drafter has {len(layers)} layers that can start from the "
            "target's: name one for each"
        )
    for layer, number in zip(layers, numbers, strict=True):
        if not -spec.num_layers <= number < spec.num_layers:
            raise ConfigError(f"drafter.init_layers names layer {number}; the target has {spec.num_layers}")
        _start(layer, f"model.layers.{number % spec.num_layers}", spec, read)


def _start(layer: SelfAttentionLayer | CrossAttentionLayer, prefix: str, spec: TargetSpec, read: Read) -> None:
    query = _neighbours(_need(read, f"{prefix}.self_attn.q_proj.weight"), spec.head_dim)
    attention = layer.attention
    if isinstance(layer, SelfAttentionLayer):
        key = _neighbours(_need(read, f"{prefix}.self_attn.k_proj.weight"), spec.head_dim)
        value = _need(read, f"{prefix}.self_attn.v_proj.weight")
        _copy(layer.attention.qkv_proj.weight, torch.cat([query, key, value]), "attention", prefix)
    else:
        _copy(layer.attention.q_proj.weight, query, "attention", prefix)
    _copy(attention.o_proj.weight, _need(read, f"{prefix}.self_attn.o_proj.weight"), "attention", prefix)
    gate, up = (_need(read, f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up"))
    _copy(layer.mlp.gate_up.weight, torch.cat([gate, up]), "intermediate_size", prefix)
    _copy(layer.mlp.down.weight, _need(read, f"{prefix}.mlp.down_proj.weight"), "intermediate_size", prefix)
    _copy(layer.mlp_norm.weight, _need(read, f"{prefix}.post_attention_layernorm.weight"), "width", prefix)
    if isinstance(layer.input_norm, torch.nn.RMSNorm):
        _copy(layer.input_norm.weight, _need(read, f"{prefix}.input_layernorm.weight"), "width", prefix)


def _need(read: Read, name: str) -> Tensor:
    found = read(name)
    if found is None:
        raise ConfigError(f"drafter.init_layers: the target has no tensor '{name}'; leave init_layers out")
    return found


def _copy(own: Tensor, theirs: Tensor, what: str, prefix: str) -> None:
    if own.shape != theirs.shape:
        raise ConfigError(
            f"drafter.init_layers: a layer's {what} is {list(own.shape)} and that of {prefix} {list(theirs.shape)}: "
            "give the drafter's layer the target's sizes"
        )
    own.copy_(theirs)


def _neighbours(weight: Float[Tensor, "rows width"], head_dim: int) -> Float[Tensor, "rows width"]:
    """Rows of a head reordered from halves to neighbours: 0, d/2, 1, d/2 + 1, ..."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
