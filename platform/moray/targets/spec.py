"""What a drafter may know about its target without loading it: sizes and a fingerprint.

Torch-free. Weights, devices and forward passes are `moray.targets.model`'s business.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from moray.config import Config
from moray.errors import ConfigError
from moray.targets.stored import read_model_config, weight_files

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose attention takes our mask, positions and cache unmodified (checked by tests)."""

_WINDOW = 1 << 20
_NUM_WINDOWS = 64


class TargetConfig(Config):
    """Which target to load, and how."""

    model: str
    """Folder of a Hugging Face model, or its hub name. Its weights are model.safetensors or the shards of its index;
    other files of weights beside them are not read."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    template: str | None = None
    """Chat template: None for the tokenizer's own, "plain" for none at all, or a jinja file."""


class TargetSpec(Config):
    """Sizes of a target, as a drafter needs them, and the fingerprint of its weights."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    fingerprint: str
    rope_scaling: str = "default"
    """Kind of rotary embedding and its parameters, as text."""

    @property
    def kv_width(self) -> int:
        """Width of one layer's key and value of one token, heads flattened as [k_h ; v_h]."""
        return 2 * self.num_kv_heads * self.head_dim


def read_spec(model: str, needs_weights: bool = True) -> TargetSpec:
    """Read a target's sizes from its `config.json` and fingerprint its weights.

    Args:
        model: folder or hub name.
        needs_weights: False where sizes are enough: weights are neither fetched nor read, and the fingerprint is empty.

    Raises:
        ConfigError: the folder is missing, or the family is not one we can verify losslessly.
    """
    folder = resolve_folder(model, needs_weights)
    config = read_model_config(folder, model)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"target.model '{model}' is of type '{config.model_type}'; supported are {', '.join(FAMILIES)}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return TargetSpec(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=_max_positions(config),
        rope_theta=float(config.rope_parameters["rope_theta"]),
        norm_eps=float(config.rms_norm_eps),
        fingerprint=fingerprint(folder) if needs_weights else "",
        rope_scaling=_rope_scaling(config.rope_parameters),
    )


def model_type_of(model: str) -> str:
    """What a model's `config.json` calls its family.

    Raises:
        ConfigError: there is none, or it does not say.
    """
    path = resolve_folder(model) / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"model '{model}': its config.json names no model_type; give a Hugging Face model") from None


def resolve_folder(model: str, needs_weights: bool = True) -> Path:
    """The local folder of a model: itself, or the snapshot that the hub client has or fetches."""
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir() or model.count("/") != 1 or model.startswith((".", "/", "runs/")):
        raise ConfigError(f"target.model '{model}': no config.json there; give a Hugging Face model folder or hub name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.model", *(["*.safetensors"] if needs_weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"target.model '{model}' is neither a folder nor a hub model that can be fetched: {type(error).__name__}"
        ) from None


def fingerprint(folder: Path) -> str:
    """Hash of a model's config and weights that costs at most 64 MiB of reading per file.

    Files up to 64 MiB are hashed whole; of larger ones, 64 evenly spaced windows of 1 MiB, the first of
    which holds the safetensors header. A changed, truncated or re-trained file changes the hash; safetensors files
    that are not the model's (see `stored.weight_files`) do not.

    Raises:
        ConfigError: there are no weights, or a shard is missing.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    volatile = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in volatile}, sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in _window_starts(size):
                file.seek(start)
                digest.update(file.read(_WINDOW))
    return digest.hexdigest()[:32]


def _window_starts(size: int) -> list[int]:
    count = min(_NUM_WINDOWS, -(-size // _WINDOW))
    if count * _WINDOW >= size:
        return [i * _WINDOW for i in range(count)]
    return [i * (size - _WINDOW) // (count - 1) for i in range(count)]


def _rope_scaling(parameters: dict[str, Any]) -> str:
    kind = parameters.get("rope_type") or "default"
    others = {key: parameters[key] for key in sorted(parameters) if key not in ("rope_type", "rope_theta")}
    return " ".join([kind, *(f"{key}={json.dumps(value)}" for key, value in others.items())])


def _max_positions(config: Any) -> int:
    """Context length; within a sliding window (Mistral) full attention gives the same result."""
    window = getattr(config, "sliding_window", None)
    uses_window = getattr(config, "use_sliding_window", config.model_type == "mistral")
    return min(config.max_position_embeddings, window) if window and uses_window else config.max_position_embeddings
