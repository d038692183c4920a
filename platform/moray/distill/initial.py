"""The weights that a new run starts from: random ones, layers of the target, or those of another drafter."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moray.config import Config
from moray.distill.configs import InitialWeights
from moray.distill.runs import first_difference
from moray.drafters.checkpoint import drafter_files, load_weights, read_contract
from moray.drafters.common.hugging_face import LAYER_TENSORS
from moray.drafters.config_base import DrafterConfigBase
from moray.drafters.configs import Eagle3Config, IndependentConfig
from moray.drafters.learner import Learner
from moray.errors import ConfigError, MismatchError
from moray.provenance import sha256_of_files
from moray.targets.spec import TargetSpec, read_spec, resolve_folder
from moray.targets.stored import StoredTensor, read_model_config, stored_tensors

_TRAINING_ONLY = ("ttt_steps", "feature_noise", "norm_init", "decay", "mask_width", "staircase", "block_size")
"""Settings of drafters that only training reads: a drafter may be trained further with others."""

_LOGGER = logging.getLogger(__name__)


def check_initial(init: InitialWeights, drafter: DrafterConfigBase, model: str, text_fingerprint: str) -> None:
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
    else:
        _check_layers(init, drafter, spec, model)


def initialise(learner: Learner, init: InitialWeights, model: str) -> None:
    """Give a new drafter the weights of a checked `init`.

    Raises:
        DataError: the weights of the drafter to start from are damaged.
    """
    if init.drafter is not None:
        load_weights(Path(init.drafter), learner)
    else:
        learner.load_target_layers(*_read_layers(init.layers, model))


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


def _check_layers(init: InitialWeights, drafter: DrafterConfigBase, spec: TargetSpec, model: str) -> None:
    sizes = drafter.sizes_for_target_layers(spec, len(init.layers))
    if sizes is None:
        raise ConfigError(
            "only drafter.type independent or glide can be initialised from target layers: leave init.layers out, or "
            "set drafter.type to one of them"
        )
    if max(init.layers) >= spec.num_layers:
        raise ConfigError(
            f"init.layers has {max(init.layers)}; the target's layers are 0 to {spec.num_layers - 1}: give some of them"
        )
    if "num_layers" not in sizes and len(init.layers) > 1:
        raise ConfigError(
            f"init.layers is {list(init.layers)}, but this drafter has a single layer: give exactly one, such as "
            f"init.layers=[{spec.num_layers - 1}]"
        )
    for key, (given, needed) in sizes.items():
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


def _read_layers(layers: tuple[int, ...], model: str) -> tuple[list[Callable[[str], Tensor]], Tensor]:
    """A reader of each layer's tensors, and the final norm."""
    stored = stored_tensors(resolve_folder(model))

    def read(name: str) -> Tensor:
        with safe_open(stored[name].path, framework="pt") as file:
            return file.get_tensor(name).float()

    readers = [lambda name, layer=layer: read(f"model.layers.{layer}.{name}") for layer in layers]
    return readers, read("model.norm.weight")
