"""Medusa heads: as vLLM reads them, and as their authors publish them.

vLLM       blocks.{head}.layers.{block}.{weight,bias}, lm_heads.{head}.weight, token_map for a reduced vocabulary
authors    {head}.{block}.linear.{weight,bias}, {head}.{blocks}.weight
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moray.drafters.configs import MedusaConfig
from moray.drafters.medusa import Medusa
from moray.drafters.published.layout import Published, check_sizes, take
from moray.errors import DataError
from moray.targets.spec import TargetSpec

_AUTHORS = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")


def write(drafter: Medusa) -> Published:
    """The form that vLLM reads."""
    spec, config = drafter.spec, drafter.config
    described: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": True,
        "truncated_vocab_size": drafter.vocabulary.size,
        "max_position_embeddings": spec.max_positions,
    }
    tensors: dict[str, Tensor] = {}
    for block, (weight, bias) in enumerate(zip(drafter.block_weights, drafter.block_biases, strict=True)):
        for head in range(config.num_heads):
            tensors[f"blocks.{head}.layers.{block}.weight"] = weight[head]
            tensors[f"blocks.{head}.layers.{block}.bias"] = bias[head, 0]
    for head in range(config.num_heads):
        own = drafter.vocabulary.rows if drafter.projections is None else drafter.projections[head]
        tensors[f"lm_heads.{head}.weight"] = own
    if drafter.vocabulary.tokens is not None:
        tensors["token_map"] = drafter.vocabulary.tokens
    return Published(described, tensors)


def configure(config: Mapping[str, Any], spec: TargetSpec, source: str, tensors: Mapping[str, Tensor]) -> MedusaConfig:
    """The configuration of a published drafter; heads and blocks are counted in its tensors.

    Raises:
        ConfigError: it belongs to a target of other sizes.
        DataError: it holds no heads.
    """
    named = _by_our_names(tensors)
    heads = {int(name.split(".")[1]) for name in named if name.startswith("lm_heads.")}
    blocks = {int(name.split(".")[3]) for name in named if name.startswith("blocks.")}
    if not heads or not blocks:
        raise DataError(f"'{source}' holds no Medusa heads: tensors lm_heads.0.weight and blocks.0.layers.0.weight")
    width = take(named, "blocks.0.layers.0.weight", source).shape[0]
    check_sizes({"vocab_size": spec.vocab_size, **config, "hidden_size": width, "head_dim": None}, spec, source)
    size = take(named, "lm_heads.0.weight", source).shape[0]
    return MedusaConfig(
        type="medusa",
        num_heads=len(heads),
        num_blocks=len(blocks),
        draft_vocab_size=None if size == spec.vocab_size else size,
    )


def read(tensors: Mapping[str, Tensor], drafter: Medusa, source: str) -> dict[str, Tensor]:
    """The weights of a published drafter by our names.

    Raises:
        DataError: a tensor is missing.
    """
    named, heads = _by_our_names(tensors), range(drafter.config.num_heads)
    found = {"projections": torch.stack([take(named, f"lm_heads.{head}.weight", source) for head in heads])}
    for block in range(drafter.config.num_blocks):
        names = [f"blocks.{head}.layers.{block}" for head in heads]
        weights = [take(named, f"{name}.weight", source) for name in names]
        found[f"block_weights.{block}"] = torch.stack(weights)
        found[f"block_biases.{block}"] = torch.stack(
            [named.get(f"{name}.bias", weights[0].new_zeros(len(weights[0]))).float()[None] for name in names]
        )
    if drafter.vocabulary.is_reduced:
        if "token_map" not in named:
            raise DataError(f"'{source}' has no tensor 'token_map', which a reduced vocabulary needs")
        found["vocabulary.tokens"] = named["token_map"].long()
    return found


def _by_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that vLLM uses."""
    found: dict[str, Tensor] = {}
    for name in tensors:
        short = name.removeprefix("medusa_head.").removeprefix("medusa_heads.")
        match = _AUTHORS.fullmatch(short)
        is_ours = short == "token_map" or short.startswith(("blocks.", "lm_heads."))
        if match is None and not is_ours:
            continue
        tensor = tensors[name]
        if match is None:
            found[short] = tensor
        elif ".linear." in short:
            found[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        else:
            found[f"lm_heads.{match[1]}.{match[3]}"] = tensor
    return found
