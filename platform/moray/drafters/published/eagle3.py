"""EAGLE-3 heads as SpecForge publishes them, and vLLM, SGLang, llama.cpp and OpenVINO read them.

The layers whose states are read stand twice in config.json: `eagle_aux_hidden_state_layer_ids` counts layers that have
run (vLLM), the list in `eagle_config` is one less (SGLang, which adds one).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moray.drafters.common.hugging_face import from_halves, to_halves
from moray.drafters.configs import Eagle3Config
from moray.drafters.eagle3 import Eagle3
from moray.drafters.published.layout import (
    Published,
    Tensors,
    block_of,
    check_sizes,
    draft_tokens,
    integer,
    llama_config,
)
from moray.errors import DataError
from moray.targets.spec import TargetSpec

_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = {
    "input_layernorm": "embedding_norm",
    "hidden_norm": "feature_norm",
    "post_attention_layernorm": "mlp_norm",
}


def write(drafter: Eagle3) -> Published:
    """The published form of a drafter."""
    spec, config = drafter.spec, drafter.config
    layers = list(drafter.hidden_layers)
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_config(spec, spec.hidden_size, spec.head_dim, config.layer, 1),
        "draft_vocab_size": drafter.vocabulary.size,
        "target_hidden_size": spec.hidden_size,
        "norm_before_residual": False,
        _IDS: layers,
        "eagle_config": {"use_aux_hidden_state": True, _IDS: [number - 1 for number in layers]},
    }
    layer, attention = drafter.layer, drafter.layer.attention
    sizes = [count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads)]
    query, key, value = attention.qkv_proj.weight.split([sizes[0], sizes[1], sizes[1]])
    gate, up = layer.mlp.gate_up.weight.chunk(2)
    tokens = drafter.vocabulary.to_tokens(torch.arange(drafter.vocabulary.size))
    known = torch.zeros(spec.vocab_size, dtype=torch.bool)
    known[tokens] = True
    tensors = {
        "fc.weight": drafter.fc.weight,
        **{f"midlayer.{theirs}.weight": getattr(layer, ours).weight for theirs, ours in _NORMS.items()},
        "midlayer.self_attn.q_proj.weight": to_halves(query, attention.head_dim),
        "midlayer.self_attn.k_proj.weight": to_halves(key, attention.head_dim),
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": attention.o_proj.weight,
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": layer.mlp.down.weight,
        "norm.weight": drafter.norm.weight,
        "lm_head.weight": drafter.projection.weight,
        "d2t": tokens - torch.arange(drafter.vocabulary.size),
        "t2d": known,
    }
    return Published(described, tensors)


def configure(config: Mapping[str, Any], spec: TargetSpec, source: str) -> Eagle3Config:
    """The configuration of a published drafter.

    Raises:
        ConfigError: it belongs to a target of other sizes.
        DataError: its config.json lacks a size, or names something that is not supported.
    """
    check_sizes(config, spec, source)
    for key, accepted in (("num_hidden_layers", 1), ("norm_before_residual", False)):
        if config.get(key, accepted) != accepted:
            raise DataError(f"source '{source}': its config.json has {key} {config[key]!r}; {accepted!r} is accepted")
    inner = config.get("eagle_config") or {}
    ids = config.get(_IDS)
    if ids is None and isinstance(inner, dict):
        ids = inner.get(_IDS) and [number + 1 for number in inner[_IDS]]
    if ids is not None and len(ids) != 3:
        raise DataError(f"source '{source}': its config.json has {_IDS} {ids}; three numbers are accepted")
    size = integer(config, "draft_vocab_size", source, spec.vocab_size)
    return Eagle3Config(
        type="eagle3",
        layer=block_of(config, source),
        hidden_layers=None if ids is None else (ids[0], ids[1], ids[2]),
        draft_vocab_size=None if size == spec.vocab_size else size,
    )


def read(tensors: Tensors, drafter: Eagle3, source: str) -> dict[str, Tensor]:
    """The weights of a published drafter by our names.

    Raises:
        DataError: a tensor is missing, or the vocabulary is in another order than the target's.
    """

    get = tensors.take
    head_dim = drafter.spec.head_dim
    query, key = (from_halves(get(f"midlayer.self_attn.{name}_proj.weight"), head_dim) for name in "qk")
    found = {
        "fc.weight": get("fc.weight"),
        **{f"layer.{ours}.weight": get(f"midlayer.{theirs}.weight") for theirs, ours in _NORMS.items()},
        "layer.attention.qkv_proj.weight": torch.cat([query, key, get("midlayer.self_attn.v_proj.weight")]),
        "layer.attention.o_proj.weight": get("midlayer.self_attn.o_proj.weight"),
        "layer.mlp.gate_up.weight": torch.cat(
            [get("midlayer.mlp.gate_proj.weight"), get("midlayer.mlp.up_proj.weight")]
        ),
        "layer.mlp.down.weight": get("midlayer.mlp.down_proj.weight"),
        "norm.weight": get("norm.weight"),
        "projection.weight": get("lm_head.weight"),
    }
    if drafter.vocabulary.is_reduced:
        size, offsets = drafter.vocabulary.size, get("d2t")
        tokens = offsets + torch.arange(size) if offsets.shape == (size,) else offsets
        found["vocabulary.tokens"] = draft_tokens(tokens, size, drafter.spec, source)
    elif "d2t" in tensors and bool(get("d2t").any()):
        raise DataError(f"source '{source}': its d2t reorders the whole vocabulary; all zeros are accepted there")
    return found
