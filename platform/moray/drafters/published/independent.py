"""Independent drafters as ordinary Llama models, which every engine runs as a draft model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moray.drafters.common.hugging_face import layer_state, layer_tensors
from moray.drafters.configs import IndependentConfig
from moray.drafters.independent import Independent
from moray.drafters.published.layout import Published, Tensors, block_of, cannot, check_sizes, integer, llama_config
from moray.targets.spec import TargetSpec


def write(drafter: Independent) -> Published:
    """The published form of a drafter; with frozen embeddings, the target's are copied in.

    Raises:
        ConfigError: it has a vocabulary projection of its own for some of the tokens only.
    """
    spec, config = drafter.spec, drafter.config
    if drafter.vocabulary.is_reduced and drafter.projection is not None:
        raise cannot(
            "independent",
            f"its own vocabulary projection has {drafter.vocabulary.size} of {spec.vocab_size} tokens",
            "train it without drafter.draft_vocab_size, or with drafter.embeddings=frozen",
        )
    described = {
        "architectures": ["LlamaForCausalLM"],
        **llama_config(spec, config.hidden_size, config.head_dim, config.layer, config.num_layers),
    }
    every_token = torch.arange(spec.vocab_size, device=drafter.head.weight.device)
    own, projection = drafter.embedding, drafter.projection
    tensors = {
        "model.embed_tokens.weight": drafter.head.embed(every_token) if own is None else own.weight,
        "model.norm.weight": drafter.norm.weight,
        "lm_head.weight": drafter.head.weight if projection is None else projection.weight,
    }
    for number, layer in enumerate(drafter.blocks):
        tensors |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer_tensors(layer).items()}
    return Published(described, tensors)


def configure(config: Mapping[str, Any], spec: TargetSpec, source: str) -> IndependentConfig:
    """The configuration of an ordinary Llama model, with embeddings of its own.

    Raises:
        ConfigError: it has another vocabulary or rotary embedding than the target.
        DataError: its config.json lacks a size, or names something that is not supported.
    """
    check_sizes(config, spec, source, needs_width=False)
    width, heads = integer(config, "hidden_size", source), integer(config, "num_attention_heads", source)
    return IndependentConfig(
        type="independent",
        num_layers=integer(config, "num_hidden_layers", source),
        hidden_size=width,
        head_dim=integer(config, "head_dim", source, width // heads),
        layer=block_of(config, source),
        embeddings="random",
    )


def read(tensors: Tensors, drafter: Independent) -> dict[str, Tensor]:
    """The weights of an ordinary Llama model by our names; its embeddings may be tied.

    Raises:
        DataError: a tensor is missing.
    """
    embeddings = tensors.take("model.embed_tokens.weight")
    found = {
        "embedding.weight": embeddings,
        "projection.weight": tensors.take("lm_head.weight") if "lm_head.weight" in tensors else embeddings.clone(),
        "norm.weight": tensors.take("model.norm.weight"),
    }
    for number in range(drafter.config.num_layers):
        prefix = f"model.layers.{number}."
        own = layer_state(lambda name, prefix=prefix: tensors.take(prefix + name), drafter.config.head_dim)
        found |= {f"layers.{number}.{name}": tensor for name, tensor in own.items()}
    return found
