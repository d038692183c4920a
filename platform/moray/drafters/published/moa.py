"""Mixture of Attentions as its authors publish it: as trained, and as converted for their version of vLLM.

    layer_self_attention.*   decoder layer over the target's layers: its sequence is one token's keys and values in each
    Ekv2E.{weight,bias}      projects the mean over those layers to the hidden size, which gives the memory
    self_attention.*         decoder layer over token embeddings
    cross_attention.*        decoder layer with the same tensor names; its keys and values come from the memory

The folder does not hold N, the number of the target's last layers that the drafter runs, so N has to be given. The
sizes of the three layers are read from the tensors. Layer self-attention numbers layers by a rotary embedding with the
target's rope_theta.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moray.drafters.common.hugging_face import cross_layer_state, layer_state
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import MoAConfig
from moray.drafters.moa.moa import MoA
from moray.drafters.published.layout import Tensors, check_sizes, integer
from moray.errors import DataError
from moray.targets.spec import TargetSpec

LAYER_SELF_ATTENTION, SELF_ATTENTION, CROSS_ATTENTION = "layer_self_attention.", "self_attention.", "cross_attention."


def configure(
    config: Mapping[str, Any], spec: TargetSpec, source: str, tensors: Tensors, target_layers: int
) -> MoAConfig:
    """The configuration of a published drafter.

    Raises:
        ConfigError: it belongs to a target of other sizes.
        DataError: a projection does not have the shape that this target needs, or there is no layer self-attention.
    """
    check_sizes(config, spec, source)
    if not any(name.startswith(LAYER_SELF_ATTENTION) for name in tensors.names):
        raise DataError(
            f"source '{source}' has no tensors layer_self_attention.*, and MoA without layer self-attention is not "
            "supported: give a drafter that was trained with it"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise DataError(
            f"source '{source}': its config.json has hidden_act {config['hidden_act']!r}; 'silu' is accepted"
        )
    num_heads = integer(config, "num_attention_heads", source)
    widths = {
        LAYER_SELF_ATTENTION: (spec.kv_width, max(1, spec.kv_width // num_heads)),
        SELF_ATTENTION: (spec.hidden_size, spec.head_dim),
        CROSS_ATTENTION: (spec.hidden_size, spec.head_dim),
    }
    blocks = {}
    for prefix, (width, head_dim) in widths.items():
        query, key = (tensors.take(f"{prefix}self_attn.{name}_proj.weight") for name in "qk")
        if query.shape != (num_heads * head_dim, width) or key.shape[0] % head_dim:
            raise DataError(
                f"source '{source}': {prefix}self_attn has q_proj {tuple(query.shape)} and k_proj {tuple(key.shape)}; "
                f"for this target {(num_heads * head_dim, width)} and a multiple of {head_dim} rows are accepted: give "
                "a drafter that was trained for it"
            )
        inner = tensors.take(f"{prefix}mlp.up_proj.weight").shape[0]
        blocks[prefix] = BlockConfig(
            num_heads=num_heads, num_kv_heads=key.shape[0] // head_dim, intermediate_size=inner
        )
    return MoAConfig(
        type="moa",
        target_layers=target_layers,
        layer_rope_theta=spec.rope_theta,
        layer_self_attention=blocks[LAYER_SELF_ATTENTION],
        self_attention=blocks[SELF_ATTENTION],
        cross_attention=blocks[CROSS_ATTENTION],
    )


def read(tensors: Tensors, drafter: MoA) -> dict[str, Tensor]:
    """The weights of a published drafter by our names.

    Raises:
        DataError: a tensor is missing.
    """
    head_dim, get = drafter.spec.head_dim, tensors.take
    lsa = layer_state(lambda name: get(LAYER_SELF_ATTENTION + name), drafter.lsa.attention.head_dim)
    sa = layer_state(lambda name: get(SELF_ATTENTION + name), head_dim)
    ca = cross_layer_state(lambda name: get(CROSS_ATTENTION + name), head_dim)
    return {
        **{f"lsa.{name}": tensor for name, tensor in lsa.items()},
        **{f"sa.{name}": tensor for name, tensor in sa.items()},
        **{f"ca.{name}": tensor for name, tensor in ca.items()},
        "to_memory.weight": get("Ekv2E.weight"),
        "to_memory.bias": get("Ekv2E.bias"),
        "feature_scale": torch.ones(()),
    }
