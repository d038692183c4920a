"""What a drafter is in a published layout: a config.json and named tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moray.drafters.config_base import BlockConfig
from moray.errors import ConfigError, DataError
from moray.targets.spec import TargetSpec

_NOT_NEEDED = ("embed_tokens.weight", "lm_head.weight", "t2d", "inv_freq")
"""Ends of names of tensors that need not be read: the target has them, or they follow from others."""


@dataclass(frozen=True)
class Published:
    """A folder's contents."""

    config: Mapping[str, Any]
    """config.json"""
    tensors: Mapping[str, Tensor]
    """model.safetensors"""


class Tensors:
    """The tensors of a published drafter; remembers which were used, for one that no drafter has is an error."""

    def __init__(self, tensors: Mapping[str, Tensor], source: str) -> None:
        self._tensors, self._source = tensors, source
        self._used = set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """All names."""
        return sorted(self._tensors)

    def take(self, name: str) -> Tensor:
        """A tensor; numbers that are not whole become float32.

        Raises:
            DataError: it is missing.
        """
        if name not in self._tensors:
            raise DataError(f"source '{self._source}' has no tensor '{name}': fetch it again, or give another one")
        self._used.add(name)
        tensor = self._tensors[name]
        return tensor.float() if tensor.is_floating_point() else tensor

    def check_all_used(self) -> None:
        """Refuse tensors that nothing has read, apart from those that the target has too.

        Raises:
            DataError: names the first one.
        """
        strange = [name for name in self.names if name not in self._used and not name.endswith(_NOT_NEEDED)]
        if strange:
            raise DataError(
                f"source '{self._source}' has tensor '{strange[0]}', which no drafter of ours has: give a drafter of "
                "EAGLE, EAGLE-3, Medusa, MoA, or a Llama model"
            )


def llama_config(spec: TargetSpec, width: int, head_dim: int, layer: BlockConfig, num_layers: int) -> dict[str, Any]:
    """The config.json of a Llama with layers of these sizes, and the target's vocabulary, context and RoPE."""
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": num_layers,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def block_of(config: Mapping[str, Any], source: str) -> BlockConfig:
    """The sizes of the layers that a config.json describes.

    Raises:
        DataError: a size is missing, or the layers compute something that ours do not.
    """
    for key, accepted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, accepted) != accepted:
            raise DataError(f"source '{source}': its config.json has {key} {config[key]!r}; {accepted!r} is accepted")
    heads = integer(config, "num_attention_heads", source)
    return BlockConfig(
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", source, heads),
        intermediate_size=integer(config, "intermediate_size", source),
    )


def integer(config: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    """A whole number of a config.json, from 1 on; null counts as left out.

    Raises:
        DataError: it is missing, or something else.
    """
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"source '{source}': its config.json has {key} {value!r}; a whole number from 1 is needed")
    return value


def check_sizes(config: Mapping[str, Any], spec: TargetSpec, source: str, *, needs_width: bool = True) -> None:
    """Refuse a drafter whose sizes, norms or rotary embedding are not the target's.

    Raises:
        ConfigError: names the key and both values.
        DataError: a size is missing, or the rotary embedding is scaled.
    """
    check_width(config, spec, source, needs_width=needs_width)
    heads, width = integer(config, "num_attention_heads", source), integer(config, "hidden_size", source)
    wanted = {"rms_norm_eps": (float(config.get("rms_norm_eps") or 1e-6), spec.norm_eps)}
    if needs_width:
        wanted["head_dim"] = (integer(config, "head_dim", source, max(1, width // heads)), spec.head_dim)
    wanted["rope_theta"] = (_theta_of(config, source), spec.rope_theta)
    for key, (given, needed) in wanted.items():
        if given != needed:
            raise ConfigError(
                f"source '{source}' has {key} {given:g}, the target {needed:g}: drafters run with the target's, so "
                "give one that was trained for this target"
            )


def check_width(config: Mapping[str, Any], spec: TargetSpec, source: str, *, needs_width: bool = True) -> None:
    """Refuse a drafter with another vocabulary or hidden size than the target's.

    Raises:
        ConfigError: names the key and both values.
    """
    keys = ("vocab_size", "hidden_size") if needs_width else ("vocab_size",)
    for key in keys:
        given, needed = integer(config, key, source, getattr(spec, key)), getattr(spec, key)
        if given != needed:
            raise ConfigError(
                f"source '{source}' has {key} {given}, the target {needed}: give a drafter for this target"
            )


def draft_tokens(tokens: Tensor, size: int, spec: TargetSpec, source: str) -> Tensor:
    """Checked token ids of a reduced vocabulary.

    Raises:
        DataError: they are not `size` different tokens of the target.
    """
    is_sound = tokens.shape == (size,) and not tokens.is_floating_point()
    if (
        not is_sound
        or len(tokens.unique()) != size
        or not 0 <= int(tokens.min()) <= int(tokens.max()) < spec.vocab_size
    ):
        raise DataError(
            f"source '{source}': its draft vocabulary is not made of {size} different tokens from 0 to "
            f"{spec.vocab_size - 1}: fetch it again"
        )
    return tokens.long()


def _theta_of(config: Mapping[str, Any], source: str) -> float:
    """The base of the rotary embedding; Llama's own default if the config.json does not say.

    Raises:
        DataError: the embedding is scaled.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise DataError(
            f"source '{source}': its config.json has a rotary embedding of type {kind!r}; 'default' is accepted"
        )
    theta = config.get("rope_theta") or parameters.get("rope_theta")
    return 10000.0 if theta is None else float(theta)


def cannot(kind: str, what: str, instead: str) -> ConfigError:
    """The error for a drafter that a layout cannot express."""
    return ConfigError(f"format is 'hf', which cannot hold this {kind} drafter: {what}; {instead}")
