"""The weights that a new run starts from: random ones, layers of the target, or those of another drafter."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moray.config import Config
from moray.distill.configs import InitialWeights
from moray.distill.runs import first_difference
from moray.drafters.checkpoint import drafter_files, load_weights, read_contract
from moray.drafters.common.hugging_face import LAYER_TENSORS, layer_state
from moray.drafters.configs import Eagle3Config, EagleConfig, GlideConfig, IndependentConfig
from moray.drafters.eagle import Eagle
from moray.drafters.glide import Glide
from moray.drafters.independent import Independent
from moray.drafters.learner import Learner
from moray.errors import ConfigError, MismatchError
from moray.provenance import sha256_of_files
from moray.targets.spec import TargetSpec, read_spec, resolve_folder
from moray.targets.stored import StoredTensor, read_model_config, stored_tensors

_TRAINING_ONLY = ("ttt_steps", "feature_noise", "norm_init", "decay", "mask_width", "staircase", "block_size")
"""Settings of drafters that only training reads: a drafter may be trained further with others."""

_LOGGER = logging.getLogger(__name__)


def check_initial(init: InitialWeights, drafter: Config, model: str, text_fingerprint: str) -> None:
    """Refuse weights that a drafter cannot start from, without reading any.

    Args:
        init: where the weights come from.
        drafter: configuration of the drafter that is trained.
        model: folder or name of the target.
        text_fingerprint: fingerprint of the target's tokenizer and chat template.

    Raises:
        ConfigError: a layer does not exist, or has sizes or tensors that the drafter does not have.
        MismatchError: the drafter to start from has another configuration or target.
        DataError: the drafter to start from is missing or damaged.
    """
    spec = read_spec(model)
    if init.drafter is not None:
        folder = Path(init.drafter)
        contract = read_contract(folder)
        contract.check_target(folder, spec, text_fingerprint)
        there, here = (_settings(config, spec.num_layers) for config in (contract.drafter, drafter))
        kinds = ({"type": there["type"]}, {"type": here["type"]})
        found = first_difference(*kinds, ()) or first_difference(there, here, _TRAINING_ONLY)
        if found is not None:
            key, before, now = found[0], *map(json.dumps, found[1:])
            raise MismatchError(
                f"init.drafter '{folder}' has drafter.{key} = {before}, here it is {now}: give drafter.{key}={before}"
            )
    elif isinstance(drafter, IndependentConfig | EagleConfig | GlideConfig):
        _check_layers(init, drafter, spec, model)
    else:
        raise ConfigError(
            "init.layers is given, but only drafters of the types independent, eagle and glide are made of layers of "
            "the target: leave it out, or give one of these types"
        )


def initialise(learner: Learner, init: InitialWeights, model: str) -> None:
    """Give a new drafter the weights of a checked `init`.

    Raises:
        DataError: the weights of the drafter to start from are damaged.
    """
    if init.drafter is not None:
        load_weights(Path(init.drafter), learner)
    else:
        _fill_layers(learner, init.layers, model)


def initial_fingerprint(init: InitialWeights) -> str:
    """Hash of what a run starts from, apart from its target.

    Raises:
        DataError: there is no drafter.
    """
    if init.drafter is None:
        return "layers"
    read_contract(Path(init.drafter))
    return sha256_of_files(drafter_files(Path(init.drafter)))


def _settings(drafter: Config, num_layers: int) -> dict[str, Any]:
    """What decides a drafter's weights and how it drafts."""
    values = drafter.model_dump(mode="json")
    if isinstance(drafter, Eagle3Config):
        values["hidden_layers"] = list(drafter.layers_of(num_layers))
    return values


def _check_layers(
    init: InitialWeights, drafter: IndependentConfig | EagleConfig | GlideConfig, spec: TargetSpec, model: str
) -> None:
    if max(init.layers) >= spec.num_layers:
        raise ConfigError(
            f"init.layers has {max(init.layers)}; the target's layers are 0 to {spec.num_layers - 1}: give some of them"
        )
    if not isinstance(drafter, IndependentConfig) and len(init.layers) > 1:
        raise ConfigError(
            f"init.layers is {list(init.layers)}, but drafter.type {drafter.type} has one layer: give the number of one"
        )
    wanted = {
        "layer.num_heads": (drafter.layer.num_heads, spec.num_heads),
        "layer.num_kv_heads": (drafter.layer.num_kv_heads, spec.num_kv_heads),
        "layer.intermediate_size": (drafter.layer.intermediate_size, spec.intermediate_size),
    }
    if isinstance(drafter, IndependentConfig):
        wanted |= {
            "num_layers": (drafter.num_layers, len(init.layers)),
            "hidden_size": (drafter.hidden_size, spec.hidden_size),
            "head_dim": (drafter.head_dim, spec.head_dim),
        }
    elif isinstance(drafter, GlideConfig):
        wanted["num_cross_heads"] = (drafter.num_cross_heads, spec.num_heads)
    for key, (given, needed) in wanted.items():
        if given != needed:
            raise ConfigError(
                f"drafter.{key} is {given}, but with init.layers={list(init.layers)} of this target it is {needed}: "
                "give that"
            )
    if isinstance(drafter, IndependentConfig) and drafter.embeddings == "random":
        raise ConfigError(
            "drafter.embeddings is random, but the target's layers only understand its own: give frozen or copied"
        )
    folder = resolve_folder(model)
    activation = getattr(read_model_config(folder, model), "hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"init.layers is {list(init.layers)}, but the target's hidden_act is '{activation}' and a drafter's is "
            "silu: leave init out"
        )
    names = _names(stored_tensors(folder), init.layers)
    if spec.routing is not None:
        raise ConfigError(
            f"init.layers is {list(init.layers)}, but target.model is sparse, whose layers are trained to be skipped: "
            "leave init out, or give the dense target"
        )
    for layer, found in names.items():
        strange = sorted(found - set(LAYER_TENSORS))
        if strange:
            raise ConfigError(
                f"init.layers has {layer}, a layer with '{strange[0]}', which the layers of a drafter do not have: "
                "leave init out"
            )
    if spec.rope_scaling != "default" or spec.sliding_window is not None:
        what = "rotary embedding is scaled" if spec.rope_scaling != "default" else "attention has a sliding window"
        _LOGGER.warning("init.layers: the target's %s, the drafter's is not; training has to make up for it", what)


def _names(stored: dict[str, StoredTensor], layers: tuple[int, ...]) -> dict[int, set[str]]:
    """The tensors of each layer, without what old checkpoints store but a model computes."""
    prefixes = {layer: f"model.layers.{layer}." for layer in layers}
    return {
        layer: {
            name.removeprefix(prefix) for name in stored if name.startswith(prefix) and not name.endswith("inv_freq")
        }
        for layer, prefix in prefixes.items()
    }


@torch.no_grad()
def _fill_layers(drafter: Learner, layers: tuple[int, ...], model: str) -> None:
    """Copy whole layers, and the final norm of drafters that have one."""
    stored = stored_tensors(resolve_folder(model))

    def read(name: str) -> Tensor:
        with safe_open(stored[name].path, framework="pt") as file:
            return file.get_tensor(name).float()

    def reader(layer: int) -> Callable[[str], Tensor]:
        return lambda name: read(f"model.layers.{layer}.{name}")

    match drafter:
        case Independent():
            for own, layer in zip(drafter.blocks, layers, strict=True):
                own.load_state_dict(layer_state(reader(layer), drafter.config.head_dim))
            drafter.norm.weight.copy_(read("model.norm.weight"))
        case Eagle():
            drafter.layer.load_state_dict(layer_state(reader(layers[0]), drafter.spec.head_dim, has_input_norm=False))
        case Glide():
            _fill_glide(drafter, reader(layers[0]))
            drafter.out_norm.weight.copy_(read("model.norm.weight"))
        case _:
            raise TypeError(f"{type(drafter).__name__} is not made of the target's layers")  # refused by check_initial


def _fill_glide(drafter: Glide, read: Callable[[str], Tensor]) -> None:
    """Give both attentions the layer's. If it is the target's last one, cross-attention reads the keys and values that
    it was trained with."""
    state = layer_state(read, drafter.spec.head_dim)
    for part, module in (("attention", drafter.self_attention), ("mlp", drafter.mlp)):
        prefix = f"{part}."
        module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    drafter.cross_query.weight.copy_(read("self_attn.q_proj.weight"))  # turned by the target's own rotary embedding
    drafter.cross_out.weight.copy_(state["attention.o_proj.weight"])
    drafter.self_norm.weight.copy_(state["input_norm.weight"])
    drafter.cross_norm.weight.copy_(state["input_norm.weight"])
    drafter.mlp_norm.weight.copy_(state["mlp_norm.weight"])
