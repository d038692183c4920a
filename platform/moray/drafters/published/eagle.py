"""EAGLE and EAGLE-2 heads as their authors publish them, and vLLM and SGLang read them.

Such a head scores with the target's own lm_head, so a reduced vocabulary is no part of it: engines score all tokens.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moray.drafters.common.hugging_face import layer_state, layer_tensors
from moray.drafters.configs import EagleConfig
from moray.drafters.eagle import Eagle
from moray.drafters.published.layout import Published, Tensors, block_of, cannot, check_sizes, llama_config
from moray.errors import DataError
from moray.targets.spec import TargetSpec


def write(drafter: Eagle) -> Published:
    """The published form of a drafter.

    Raises:
        ConfigError: it has a bias, which vLLM drops, or reads the first token, which engines leave out.
    """
    spec, config = drafter.spec, drafter.config
    if config.bias:
        raise cannot("eagle", "fc has a bias, which vLLM drops", "train it with drafter.bias=false")
    if config.reads_first_token:
        raise cannot("eagle", "it reads the first token", "train it with drafter.reads_first_token=false")
    described = {
        "architectures": ["LlamaForCausalLM"],  # vLLM puts "Eagle" before it
        **llama_config(spec, spec.hidden_size, spec.head_dim, config.layer, 1),
        "bias": False,
    }
    tensors = {
        "fc.weight": drafter.fc.weight,
        **{f"layers.0.{name}": tensor for name, tensor in layer_tensors(drafter.layer).items()},
    }
    return Published(described, tensors)


def configure(config: Mapping[str, Any], spec: TargetSpec, source: str, tensors: Tensors) -> EagleConfig:
    """The configuration of a published drafter.

    Raises:
        ConfigError: it belongs to a target of other sizes.
        DataError: its config.json lacks a size, or names something that is not supported.
    """
    check_sizes(config, spec, source)
    if config.get("num_hidden_layers", 1) != 1:
        raise DataError(f"source '{source}': its config.json has {config['num_hidden_layers']} layers; 1 is accepted")
    return EagleConfig(type="eagle", layer=block_of(config, source), bias="fc.bias" in tensors, reads_first_token=False)


def read(tensors: Tensors, drafter: Eagle) -> dict[str, Tensor]:
    """The weights of a published drafter by our names.

    Raises:
        DataError: a tensor is missing.
    """

    layer = layer_state(lambda name: tensors.take(f"layers.0.{name}"), drafter.spec.head_dim, has_input_norm=False)
    found = {"fc.weight": tensors.take("fc.weight"), **{f"layer.{name}": each for name, each in layer.items()}}
    if drafter.config.bias:
        found["fc.bias"] = tensors.take("fc.bias")
    return found
