"""What a drafter may know about its target without loading it: sizes and a fingerprint.

Torch-free. Weights, devices and forward passes are in `moray.targets.model`.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from moray.config import Config
from moray.errors import ConfigError
from moray.explain import one_line
from moray.models import check_path, folder_of
from moray.models.families import FAMILIES, check_family
from moray.targets.stored import read_model_config, weight_files

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Types of rotary embedding in which a token's rotation within the context depends only on its position, however long
its sequence is or becomes (checked by tests)."""

ROUTING, ROUTERS = "routing.json", "routers.safetensors"
"""Files that make a model's folder a sparse target (see `targets.sparse.routing`)."""
_WINDOW = 1 << 20
_NUM_WINDOWS = 64


class TargetConfig(Config):
    """Which target to load, and how."""

    model: str
    """Folder of a Hugging Face model, its hub name, or a GGUF file of the families llama, qwen2 and qwen3. A GGUF file
    is converted once, into a folder next to it. A folder's weights are model.safetensors or the shards in its index;
    other weight files are not read."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto takes the GPU if there is one."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of processes on one machine over which the target is split; each holds a part of every layer. With GPUs,
    each needs one of its own. For targets that do not fit on one GPU; on CPUs it only makes decoding slower."""
    template: str | None = None
    """Chat template: a jinja file, or plain for none; null for the tokenizer's own."""


class RoutingSpec(Config):
    """Which layers of a sparse target have routers, and what these read (see `targets.sparse.routing`)."""

    first_layer: int = Field(default=2, ge=0)
    """First layer with a router; those before it run for every token."""
    last_layers: int = Field(default=0, ge=0)
    """How many of the last layers run for every token; a drafter that runs the target's last N layers needs N."""
    router_size: int = Field(ge=1)
    """Inner width of a router."""
    router_bits: int | None = Field(default=None, ge=1, le=8)
    """Bits of the codes that routers read in place of hidden states; null for the hidden states themselves."""
    initial_tokens: int = Field(default=2, ge=1)
    """The first tokens of a sequence run through every layer, so that no layer is ever without keys."""
    share: float = Field(gt=0, le=1)
    """Mean share of the layers that a token was trained to run through, those without routers included."""

    def routed_layers(self, num_layers: int) -> range:
        """Layers with routers.

        Raises:
            ConfigError: there are none.
        """
        layers = range(self.first_layer, num_layers - self.last_layers)
        if not layers:
            raise ConfigError(
                f"first_layer is {self.first_layer} and last_layers {self.last_layers}, which leaves no layer of "
                f"{num_layers} with a router: give smaller numbers"
            )
        return layers

    @classmethod
    def read(cls, folder: Path, field: str = "target.model") -> "RoutingSpec | None":
        """The routing of a model; None for an ordinary one.

        Raises:
            ConfigError: its routing.json is damaged.
        """
        path = folder / ROUTING
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field} '{folder}': {ROUTING} cannot be used: {one_line(str(error))}") from None

    def save(self, folder: Path) -> None:
        """Write it beside a model."""
        (folder / ROUTING).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


class TargetSpec(Config):
    """Sizes of a target that a drafter needs, and the fingerprint of its weights."""

    family: Annotated[str, AfterValidator(check_family)]
    """`model_type` of its config.json; see `moray.models.families`."""
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
    """Type of rotary embedding and its parameters, as text."""
    sliding_window: int | None = None
    """Positions that a query sees in `sliding_layers`, including its own; None if no layer has a window shorter than
    the context."""
    sliding_layers: tuple[int, ...] = ()
    routing: RoutingSpec | None = None
    """Of a sparse target; None if every token runs through every layer."""

    @property
    def kv_width(self) -> int:
        """Width of one layer's key and value of one token, heads flattened as [k_h ; v_h]."""
        return 2 * self.num_kv_heads * self.head_dim

    def need_last_layers(self, count: int, reader: str) -> None:
        """Check that the last `count` layers run for every token, because a drafter reads them.

        Raises:
            ConfigError: names `reader`, the setting of the drafter.
        """
        if self.routing is not None and self.routing.last_layers < count:
            raise ConfigError(
                f"{reader} needs the target's last {count} layers for every token; this sparse target has "
                f"last_layers {self.routing.last_layers}: give another drafter, or a target trained with "
                f"sparse.last_layers={count}"
            )

    @property
    def for_plan(self) -> dict[str, Any]:
        """The spec as stored in a cache's plan: fields of windows and routing only if there are any, so that plans
        without them stay equal to older ones."""
        left_out = {"sliding_window", "sliding_layers"} if self.sliding_window is None else set[str]()
        left_out |= {"routing"} if self.routing is None else set[str]()
        return self.model_dump(mode="json", exclude=left_out)


def read_spec(model: str, needs_weights: bool = True, field: str = "target.model") -> TargetSpec:
    """Read a target's sizes from its `config.json` and fingerprint its weights.

    Args:
        model: folder or hub name.
        needs_weights: False if sizes are enough: weights are neither fetched nor read, and the fingerprint is empty.
        field: the setting that names the model, for error messages.

    Raises:
        ConfigError: the folder is missing, or verification is not lossless with its family, rotary embedding or
            windows.
    """
    folder = resolve_folder(model, needs_weights, field)
    config = read_model_config(folder, model, field)
    if config.model_type not in FAMILIES:
        raise ConfigError(f"{field} '{model}' is of type '{config.model_type}'; supported are {', '.join(FAMILIES)}")
    rope_scaling = _rope_scaling(f"{field} '{model}'", config.rope_parameters)
    sliding_layers = _sliding_layers(f"{field} '{model}'", config)
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
        max_positions=config.max_position_embeddings,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        norm_eps=float(config.rms_norm_eps),
        fingerprint=fingerprint(folder, field) if needs_weights else "",
        rope_scaling=rope_scaling,
        sliding_window=config.sliding_window if sliding_layers else None,
        sliding_layers=sliding_layers,
        routing=_routing(folder, config.num_hidden_layers, field),
    )


def _routing(folder: Path, num_layers: int, field: str) -> RoutingSpec | None:
    routing = RoutingSpec.read(folder, field)
    if routing is not None:
        routing.routed_layers(num_layers)
    return routing


def model_type_of(model: str, field: str) -> str:
    """The family of a model according to its `config.json`.

    Raises:
        ConfigError: there is no config.json, or it does not say.
    """
    path = resolve_folder(model, field=field) / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{field} '{model}': its config.json names no model_type; give a Hugging Face model"
        ) from None


def resolve_folder(model: str, needs_weights: bool = True, field: str = "target.model") -> Path:
    """The local folder of a model: itself, the conversion of a GGUF file, or the hub client's snapshot, fetched if
    needed."""
    folder = folder_of(model) or Path(model)
    if (folder / "config.json").is_file():
        return folder
    check_path(model, field)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.model", *(["*.safetensors"] if needs_weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{field} '{model}' is no folder, and the hub cannot be reached to fetch it, nor is it in the hub's local "
            "cache: give a folder or a GGUF file"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"{field} '{model}' is neither a folder nor a hub model that can be fetched: {type(error).__name__}"
        ) from None


def fingerprint(folder: Path, field: str = "target.model") -> str:
    """Hash of a model's config and weights that reads at most 64 MiB per file.

    Files up to 64 MiB are hashed whole; larger ones by 64 evenly spaced windows of 1 MiB, the first of which holds the
    safetensors header. A changed, truncated or re-trained file changes the hash; safetensors files that are not the
    model's (see `stored.weight_files`) do not.

    Raises:
        ConfigError: there are no weights, or a shard is missing.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    volatile = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
    digest.update(json.dumps({k: v for k, v in config.items() if k not in volatile}, sort_keys=True).encode())
    extra = [folder / name for name in (ROUTING, ROUTERS) if (folder / name).is_file()]
    for path in [*weight_files(folder, field), *extra]:
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


def _rope_scaling(whose: str, parameters: dict[str, Any]) -> str:
    kind = parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{whose}: rope_type is {kind!r} in its rope_parameters; accepted are "
            f"{', '.join(ROPE_TYPES)}, one for all layers: with others, longrope among them, a token's rotation may "
            "depend on the length of its sequence, and no draft could be verified; give another target"
        )
    others = {key: parameters[key] for key in sorted(parameters) if key not in ("rope_type", "rope_theta")}
    return " ".join([kind, *(f"{key}={json.dumps(value)}" for key, value in others.items())])


def _sliding_layers(whose: str, config: Any) -> tuple[int, ...]:
    """Layers whose window is shorter than the context, determined for each family as transformers does."""
    windows = FAMILIES[config.model_type].windows
    if windows == "never":
        return ()
    window = config.sliding_window
    kinds = getattr(config, "layer_types", None) if windows == "layer_types" else None
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if strange:
        raise ConfigError(
            f"{whose}: layer_types has '{strange[0]}'; accepted are full_attention and "
            "sliding_attention: give another target"
        )
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if sliding and (window is None or window < 1):
        raise ConfigError(
            f"{whose}: layer {sliding[0]} has sliding attention and sliding_window is {window}; a "
            "number from 1 on is accepted, and use_sliding_window=true where its family has that: fix its config.json"
        )
    return sliding if window is not None and window < config.max_position_embeddings else ()
