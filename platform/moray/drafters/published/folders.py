"""Folders of published drafters: which kind is there, and its weights, read without executing anything."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moray.drafters.base import Drafter
from moray.drafters.checkpoint import fill
from moray.drafters.config_base import DrafterConfigBase
from moray.drafters.configs import EagleConfig, MedusaConfig
from moray.drafters.eagle import Eagle
from moray.drafters.eagle3 import Eagle3
from moray.drafters.independent import Independent
from moray.drafters.medusa import Medusa
from moray.drafters.moa.moa import MoA
from moray.drafters.published import eagle, eagle3, independent, medusa, moa
from moray.drafters.published.layout import Published, Tensors
from moray.errors import ConfigError, DataError
from moray.explain import one_line
from moray.targets.head import TargetHead
from moray.targets.spec import TargetSpec
from moray.targets.stored import weight_files

_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")


def published_form(drafter: Drafter) -> Published:
    """A drafter in its published layout.

    Raises:
        ConfigError: no engine runs drafters of its type, or the layout cannot hold this one.
    """
    scaling = drafter.spec.rope_scaling
    if scaling != "default" and not isinstance(drafter, Medusa):
        raise ConfigError(
            f"format is 'hf', and the target's rotary embedding is scaled ({scaling.split()[0]}), which the drafter's "
            "is not: engines would scale the drafter's too; export with format=moray"
        )
    described: Any = drafter.config
    if isinstance(drafter, Eagle3):
        found = eagle3.write(drafter)
    elif isinstance(drafter, Eagle):
        found = eagle.write(drafter)
    elif isinstance(drafter, Medusa):
        found = medusa.write(drafter)
    elif isinstance(drafter, Independent):
        found = independent.write(drafter)
    else:
        raise ConfigError(
            f"format is 'hf', and drafter.type {described.type}: other engines run eagle3, eagle, "
            "medusa and independent; export this one with format=moray"
        )
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in found.tensors.items()}
    return Published(found.config, tensors)


def engine_limitations(config: DrafterConfigBase) -> list[str]:
    """What other engines cannot do with the published form of a drafter, one line each."""
    if not isinstance(config, (EagleConfig, MedusaConfig)) or config.draft_vocab_size is None:
        return []
    size = config.draft_vocab_size
    if not engines_can_load(config):
        return [
            f"drafter.draft_vocab_size is {size} and drafter.projections is own, but vLLM 0.32 cannot load such heads "
            "over a reduced vocabulary: train with drafter.projections=frozen or drafter.draft_vocab_size=null"
        ]
    return [
        f"drafter.draft_vocab_size is {size}, but vLLM scores the whole vocabulary: train with "
        "drafter.draft_vocab_size=null for the same drafts in both"
    ]


def engines_can_load(config: DrafterConfigBase) -> bool:
    """Whether the engines of the layout can load the published form: vLLM 0.32 loads no Medusa heads over a reduced
    vocabulary."""
    return not isinstance(config, MedusaConfig) or config.projections == "frozen" or config.draft_vocab_size is None


def read_published(source: Path, head: TargetHead, target_layers: int | None = None) -> Drafter:
    """Build a drafter from a folder of EAGLE, EAGLE-3, Medusa, MoA or an ordinary Llama model, in eval mode.

    Args:
        source: the folder.
        head: of the target, with as many of its last layers as the drafter runs.
        target_layers: number of the target's last layers that a MoA drafter runs; None for any other drafter.

    Raises:
        ConfigError: it belongs to a target of other sizes, or `target_layers` is missing for a MoA drafter or given for
            another one.
        DataError: nothing of the kind is there, it is damaged, or it has parts that are not supported.
    """
    name = str(source)
    described, tensors = _config_of(source), Tensors(_tensors_of(source), name)
    try:
        config = _configure(described, tensors, head.spec, name, target_layers)
    except (ValueError, TypeError, AttributeError) as error:  # pydantic's errors are of the first kind
        raise DataError(f"source '{source}': its config.json cannot be used: {one_line(str(error))[:200]}") from None
    drafter = config.build(head)
    if isinstance(drafter, (Eagle, Eagle3)):
        _check_embeddings(tensors, head, name)
    try:
        state = _state_of(tensors, drafter, name)
    except (RuntimeError, IndexError) as error:
        raise DataError(
            f"source '{source}': its tensors do not have the sizes of its config.json: {one_line(str(error))[:200]}; "
            "fetch it again"
        ) from None
    tensors.check_all_used()
    fill(drafter, {key: tensor.contiguous() for key, tensor in state.items()}, source)
    return drafter.eval()


def _state_of(tensors: Tensors, drafter: Drafter, name: str) -> dict[str, Tensor]:
    """The weights by our names."""
    if isinstance(drafter, Eagle3):
        return eagle3.read(tensors, drafter, name)
    if isinstance(drafter, Eagle):
        return eagle.read(tensors, drafter)
    if isinstance(drafter, Medusa):
        return medusa.read(tensors, drafter, name)
    if isinstance(drafter, MoA):
        return moa.read(tensors, drafter)
    assert isinstance(drafter, Independent)
    return independent.read(tensors, drafter)


def _check_embeddings(tensors: Tensors, head: TargetHead, source: str) -> None:
    """Refuse a drafter with embeddings of its own: ours read the target's.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    for name in ("embed_tokens.weight", "model.embed_tokens.weight"):
        if name in tensors:
            theirs, ours = tensors.take(name), head.embed(torch.arange(head.spec.vocab_size)).float()
            if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=0.02, atol=1e-3):
                raise ConfigError(
                    f"source '{source}': its {name} is not the target's, which the drafter would read: give the target "
                    "that it was trained for"
                )


def _configure(
    described: Mapping[str, Any], tensors: Tensors, spec: TargetSpec, name: str, target_layers: int | None
) -> DrafterConfigBase:
    is_moa = any(key.startswith(moa.CROSS_ATTENTION) for key in tensors.names)
    if is_moa and target_layers is None:
        raise ConfigError(
            f"target_layers is not given, but source '{name}' is a MoA drafter, whose folder does not say how many of "
            "the target's last layers it runs: give target_layers=N, 0 if it runs none"
        )
    if target_layers is not None:
        if not is_moa:
            raise ConfigError(f"target_layers is {target_layers}, but source '{name}' is no MoA drafter: leave it out")
        return moa.configure(described, spec, name, tensors, target_layers)
    if any(key.startswith("midlayer.") for key in tensors.names):
        return eagle3.configure(described, spec, name)
    if "fc.weight" in tensors:
        return eagle.configure(described, spec, name, tensors)
    if described.get("model_type") == "medusa" or any("medusa" in key for key in (*described, *tensors.names)):
        return medusa.configure(described, spec, name, tensors)
    if described.get("model_type") == "llama" and "model.embed_tokens.weight" in tensors:
        return independent.configure(described, spec, name)
    raise DataError(
        f"'{name}' is no drafter of a known layout: accepted are EAGLE (fc, layers.0), EAGLE-3 (fc, midlayer), Medusa "
        "heads, MoA (cross_attention), and Llama models; a model of another family is used as "
        "{type: pretrained, model: FOLDER}"
    )


def _config_of(source: Path) -> dict[str, Any]:
    try:
        found = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"source '{source}' has no usable config.json: {one_line(str(error))}") from None
    if not isinstance(found, dict):
        raise DataError(f"source '{source}' has no usable config.json: it is no object")
    return found


def _tensors_of(source: Path) -> dict[str, Tensor]:
    """All tensors: of safetensors files, or else of a pickle, of which only tensors are read."""
    files = weight_files(source, "source") if any(source.glob("*.safetensors")) else []
    pickled = [source / name for name in _PICKLED if (source / name).is_file()]
    try:
        if files:
            return {name: tensor for path in files for name, tensor in load_file(path).items()}
        for path in pickled:
            found = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
                raise DataError(f"'{path}' holds something else than named tensors: save its state dict alone")
            return {str(name): tensor for name, tensor in found.items()}
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"'{source}' has damaged weights: {one_line(str(error))[:200]}; fetch it again") from None
    raise DataError(f"'{source}' has no weights: *.safetensors, {' or '.join(_PICKLED)} is needed")
