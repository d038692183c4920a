"""Medusa heads: as vLLM reads them, and as their authors publish them.

vLLM       blocks.{head}.layers.{block}.{weight,bias}, lm_heads.{head}.weight, token_map for a reduced vocabulary;
           with original_lm_head in config.json only lm_heads.0.weight, which all heads share
authors    {head}.{block}.linear.{weight,bias}, {head}.{blocks}.weight
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moray.drafters.configs import MedusaConfig
from moray.drafters.medusa import Medusa
from moray.drafters.published.layout import Published, Tensors, check_width, draft_tokens
from moray.errors import DataError
from moray.targets.spec import TargetSpec

_VLLM = re.compile(r"blocks\.\d+\.layers\.\d+\.(weight|bias)|lm_heads\.\d+\.weight|token_map")
_AUTHORS = re.compile(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")


def write(drafter: Medusa) -> Published:
    """The form that vLLM reads.

    Frozen projections are the target's lm_head. They are written once, as lm_heads.0, and whole: vLLM 0.32 loads no
    token_map.
    """
    spec, config = drafter.spec, drafter.config
    is_frozen = drafter.projections is None
    projections = [drafter.head.weight] if drafter.projections is None else list(drafter.projections)
    described: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": True,
        "truncated_vocab_size": len(projections[0]),
        "max_position_embeddings": spec.max_positions,
        "original_lm_head": is_frozen,
    }
    tensors: dict[str, Tensor] = {}
    for block, (weight, bias) in enumerate(zip(drafter.block_weights, drafter.block_biases, strict=True)):
        for head in range(config.num_heads):
            tensors[f"blocks.{head}.layers.{block}.weight"] = weight[head]
            tensors[f"blocks.{head}.layers.{block}.bias"] = bias[head, 0]
    tensors |= {f"lm_heads.{head}.weight": weight for head, weight in enumerate(projections)}
    if drafter.vocabulary.tokens is not None and not is_frozen:
        tensors["token_map"] = drafter.vocabulary.tokens
    return Published(described, tensors)


def configure(config: Mapping[str, Any], spec: TargetSpec, source: str, tensors: Tensors) -> MedusaConfig:
    """The configuration of a published drafter; heads and blocks are counted in its tensors.

    Raises:
        ConfigError: it belongs to a target of other sizes.
        DataError: it holds no heads.
    """
    names = _names(tensors)
    heads = {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
    blocks = {int(name.split(".")[3]) for name in names if name.startswith("blocks.")}
    if heads != set(range(len(heads))) or blocks != set(range(len(blocks))) or not heads or not blocks:
        raise DataError(
            f"source '{source}' has Medusa heads {sorted(heads)} with blocks {sorted(blocks)}; numbers from 0 on, "
            "without gaps, are accepted: fetch it again"
        )
    width = tensors.take(names.get("blocks.0.layers.0.weight", "blocks.0.layers.0.weight")).shape[0]
    check_width({**config, "hidden_size": width}, spec, source)
    size = tensors.take(names.get("lm_heads.0.weight", "lm_heads.0.weight")).shape[0]
    return MedusaConfig(
        type="medusa",
        num_heads=len(heads),
        num_blocks=len(blocks),
        projections="frozen" if config.get("original_lm_head") else "own",
        draft_vocab_size=None if size == spec.vocab_size else size,
    )


def read(tensors: Tensors, drafter: Medusa, source: str) -> dict[str, Tensor]:
    """The weights of a published drafter by our names; blocks without a bias get zeros.

    Raises:
        DataError: a tensor is missing, or the projection that all heads share is not the target's.
    """
    names, heads = _names(tensors), range(drafter.config.num_heads)

    def take(name: str) -> Tensor:
        return tensors.take(names.get(name, name))

    found: dict[str, Tensor] = {}
    if drafter.config.projections == "own":
        found["projections"] = torch.stack([take(f"lm_heads.{head}.weight") for head in heads])
    for block in range(drafter.config.num_blocks):
        own = [f"blocks.{head}.layers.{block}" for head in heads]
        weights = [take(f"{name}.weight") for name in own]
        biases = [
            take(f"{name}.bias") if f"{name}.bias" in names else weights[0].new_zeros(len(weights[0])) for name in own
        ]
        found[f"block_weights.{block}"] = torch.stack(weights)
        found[f"block_biases.{block}"] = torch.stack(biases)[:, None]
    if drafter.vocabulary.is_reduced:
        found["vocabulary.tokens"] = draft_tokens(take("token_map"), drafter.vocabulary.size, drafter.spec, source)
    if drafter.config.projections == "frozen":
        theirs, ours = take("lm_heads.0.weight"), drafter.vocabulary.rows.float().cpu()
        if not torch.allclose(theirs, ours, rtol=0.02, atol=1e-3):  # either may have been rounded to bfloat16
            raise DataError(
                f"source '{source}': its config.json says original_lm_head, but lm_heads.0.weight is not the target's "
                "lm_head: set target.model to the target that the heads were trained for"
            )
    return found


def _names(tensors: Tensors) -> dict[str, str]:
    """The names of a file's tensors, by those that vLLM uses; others are left out."""
    found: dict[str, str] = {}
    for name in tensors.names:
        short = name.removeprefix("medusa_head.").removeprefix("medusa_heads.")
        match = _AUTHORS.fullmatch(short)
        if match is not None:
            kind = f"blocks.{match[1]}.layers.{match[2]}" if ".linear." in short else f"lm_heads.{match[1]}"
            found[f"{kind}.{match[3]}"] = name
        elif _VLLM.fullmatch(short):
            found[short] = name
    return found
