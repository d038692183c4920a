"""Mixture of Attentions as its authors publish it: as trained, and as converted for their version of vLLM.

    layer_self_attention.*   a decoder layer over the keys and values of all of the target's layers
    Ekv2E.{weight,bias}      from their mean to the hidden size
    self_attention.*         a decoder layer over embeddings
    cross_attention.*        the same tensors; keys and values come from the memory

Neither form says N, the number of the target's layers that the drafter runs, or the sizes of the three layers as
trained: N has to be given, and sizes follow from the tensors. The embedding over layers has the base of the target's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moray.drafters.common.hugging_face import from_halves, layer_state
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import MoAConfig
from moray.drafters.moa.moa import MoA
from moray.drafters.published.layout import Tensors, check_sizes, integer
from moray.errors import DataError
from moray.targets.spec import TargetSpec

LAYERS, TOKENS, MEMORY = "layer_self_attention.", "self_attention.", "cross_attention."


def configure(
    config: Mapping[str, Any], spec: TargetSpec, source: str, tensors: Tensors, target_layers: int
) -> MoAConfig:
    """The configuration of a published drafter.

    Raises:
        ConfigError: it belongs to a target of other sizes.
        DataError: its tensors have no sizes that ours can have, or it has no attention over layers.
    """
    check_sizes(config, spec, source)
    if not any(name.startswith(LAYERS) for name in tensors.names):
        raise DataError(f"source '{source}': it has no layer_self_attention, without which MoA is not supported")
    num_heads = integer(config, "num_attention_heads", source)
    widths = {
        LAYERS: (spec.kv_width, max(1, spec.kv_width // num_heads)),
        TOKENS: (spec.hidden_size, spec.head_dim),
        MEMORY: (spec.hidden_size, spec.head_dim),
    }
    blocks = {}
    for prefix, (width, head_dim) in widths.items():
        query, key = (tensors.take(f"{prefix}self_attn.{name}_proj.weight") for name in "qk")
        if query.shape != (num_heads * head_dim, width) or key.shape[0] % head_dim:
            raise DataError(
                f"source '{source}': {prefix}self_attn has projections {tuple(query.shape)} and {tuple(key.shape)}; "
                f"for this target {(num_heads * head_dim, width)} and a multiple of {head_dim} rows are accepted"
            )
        inner = tensors.take(f"{prefix}mlp.up_proj.weight").shape[0]
        blocks[prefix] = BlockConfig(
            num_heads=num_heads, num_kv_heads=key.shape[0] // head_dim, intermediate_size=inner
        )
    return MoAConfig(
        type="moa",
        target_layers=target_layers,
        layer_rope_theta=spec.rope_theta,
        layer_self_attention=blocks[LAYERS],
        self_attention=blocks[TOKENS],
        cross_attention=blocks[MEMORY],
    )


def read(tensors: Tensors, drafter: MoA) -> dict[str, Tensor]:
    """The weights of a published drafter by our names.

    Raises:
        DataError: a tensor is missing.
    """
    head_dim, get = drafter.spec.head_dim, tensors.take
    layers = layer_state(lambda name: get(LAYERS + name), drafter.lsa.attention.head_dim)
    tokens = layer_state(lambda name: get(TOKENS + name), head_dim)
    query, key = (from_halves(get(f"{MEMORY}self_attn.{name}_proj.weight"), head_dim) for name in "qk")
    return {
        **{f"lsa.{name}": tensor for name, tensor in layers.items()},
        **{f"sa.{name}": tensor for name, tensor in tokens.items()},
        "to_memory.weight": get("Ekv2E.weight"),
        "to_memory.bias": get("Ekv2E.bias"),
        "ca.input_norm.weight": get(f"{MEMORY}input_layernorm.weight"),
        "ca.mlp_norm.weight": get(f"{MEMORY}post_attention_layernorm.weight"),
        "ca.mlp.gate_up.weight": torch.cat([get(f"{MEMORY}mlp.gate_proj.weight"), get(f"{MEMORY}mlp.up_proj.weight")]),
        "ca.mlp.down.weight": get(f"{MEMORY}mlp.down_proj.weight"),
        "ca.attention.q_proj.weight": query,
        "ca.attention.kv_proj.weight": torch.cat([key, get(f"{MEMORY}self_attn.v_proj.weight")]),
        "ca.attention.o_proj.weight": get(f"{MEMORY}self_attn.o_proj.weight"),
        "feature_scale": torch.ones(()),
    }
