"""What is stored in a model's folder: its config.json, and the tensors in its safetensors files. Torch-free.

The weights are the files that transformers reads: `model.safetensors` if it exists, otherwise the shards that
`model.safetensors.index.json` names. Other safetensors files in the folder (such as the `consolidated.safetensors` of
some publishers) are never read, and are not part of the fingerprint.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moray.errors import ConfigError
from moray.explain import one_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored, with its shape and dtype."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: "F32", "BF16", ..."""


def read_model_config(folder: Path, model: str, field: str = "target.model") -> Any:
    """Read a folder's config.json as transformers does.

    Args:
        folder: holds the config.json.
        model: the model as the user named it.
        field: the configuration field that names it.

    Raises:
        ConfigError: it cannot be read, or needs something that is not supported here: quantised weights, adapters, or
            weights in a file with another name.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, LookupError, ImportError, StrictDataclassError) as error:
        raise ConfigError(f"{field} '{model}': its config.json cannot be used: {one_line(str(error))}") from None
    found = f"{field} '{model}': its config.json has"
    quantised: Any = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{found} a quantization_config ({method}); accepted are weights in float32, bfloat16 or float16: give the "
            "model they were quantised from"
        )
    if getattr(config, "transformers_weights", None) is not None:
        raise ConfigError(f"{found} transformers_weights; accepted are {WEIGHTS} and {INDEX}: rename the file")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{field} '{model}': there is an adapter_config.json; accepted are whole models: merge the adapter and "
            "save the model"
        )
    return config


def check_rope_type(config: Any, model: str, field: str) -> None:
    """Reject a rotary embedding that transformers does not know; targets accept fewer (see `spec.ROPE_TYPES`).

    Raises:
        ConfigError: names the type and what is accepted.
    """
    parameters: Any = getattr(config.get_text_config(), "rope_parameters", None)
    kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
    if kind in (None, "default"):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise ConfigError(f"{field} '{model}': rope_type is {kind!r} in its rope_parameters; accepted are {known}")


def weight_files(folder: Path, field: str = "target.model") -> list[Path]:
    """The safetensors files that hold a model's weights, sorted by name.

    Raises:
        ConfigError: there are none, or the index cannot be read or names a file that is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(_index(folder, field).values()))]


def stored_tensors(folder: Path, field: str = "target.model") -> dict[str, StoredTensor]:
    """Every tensor of a model by name; only the headers of the files are read.

    Raises:
        ConfigError: a file cannot be read, a tensor is not in the shard that the index names, or it is in two.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder, field):
        try:
            with safe_open(path, framework="numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                tensors = {
                    name: StoredTensor(path, tuple(one.get_shape()), str(one.get_dtype()))
                    for name, one in slices.items()
                }
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{field} '{folder}' cannot be loaded: {path.name}: {one_line(str(error))}; fetch it again"
            ) from None
        for name in tensors.keys() & found.keys():
            raise ConfigError(
                f"{field} '{folder}': tensor '{name}' is in {found[name].path.name} and in {path.name}; one place is "
                "accepted: fetch the model again"
            )
        found |= tensors
    if not (folder / WEIGHTS).is_file():
        for name, file in _index(folder, field).items():
            if name not in found or found[name].path.name != file:
                raise ConfigError(
                    f"{field} '{folder}': tensor '{name}' is not in {file}, where {INDEX} has it; fetch both again"
                )
    return found


def _index(folder: Path, field: str) -> dict[str, str]:
    """The shard of every tensor, after checking that all shards exist."""
    path = folder / INDEX
    if not path.is_file():
        raise ConfigError(
            f"{field} '{folder}': no {WEIGHTS} and no {INDEX} there; other files of weights (*.bin, *.gguf, "
            "*.safetensors of other names) are not read: save the model with save_pretrained"
        )
    try:
        shard_of = {str(name): str(file) for name, file in json.loads(path.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{field}: '{path}' cannot be read: {one_line(str(error))}; fetch it again") from None
    if not shard_of:
        raise ConfigError(f"{field}: '{path}' names no tensor; fetch it again")
    for name, file in shard_of.items():
        if Path(file).name != file or not (folder / file).is_file():
            raise ConfigError(
                f"{field} '{folder}': shard '{file}' is missing, in which {INDEX} has tensor '{name}'; fetch it again"
            )
    return shard_of
