"""The model families that a target may belong to, and how they differ; all else is the same for all of them.

To add a family, add an entry here and a tiny target of the family in `tests/tiny_targets.py`: the contract tests then
compare every drafter and tree with transformers' own text for it, and `unit/targets/test_fused_layer.py` the fused
layers with transformers' own.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """How one family differs from the others."""

    causal_lm: str
    """transformers' class."""
    gguf_architecture: str
    """`general.architecture` of its GGUF files."""
    windows: Literal["never", "every_layer", "layer_types"]
    """Which layers have sliding windows, if config.json gives a `sliding_window`: none of them, all, or those that its
    `layer_types` names."""
    gguf_rotates_neighbours: bool = False
    """Whether the query and key rows of its GGUF files are ordered such that neighbours are rotated against each other.
    transformers rotates the first half of a head against the second."""
    has_fixed_biases: bool = False
    """Whether its query, key and value projections always have biases, so that config.json has no `attention_bias`."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", "never", gguf_rotates_neighbours=True),
    "mistral": Family("MistralForCausalLM", "llama", "every_layer", gguf_rotates_neighbours=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", "layer_types", has_fixed_biases=True),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", "layer_types"),
}
"""Families whose attention works with our mask, positions and cache unmodified (checked by tests), by `model_type` of
config.json."""


def check_family(model_type: str) -> str:
    """The model type, if it is supported; raises ValueError otherwise, as pydantic's validators do."""
    if model_type not in FAMILIES:
        raise ValueError(f"'{model_type}' is not supported; supported are {', '.join(FAMILIES)}")
    return model_type


def gguf_architectures() -> dict[str, str]:
    """The model type that a GGUF file of each architecture is converted to: the first that has it, because Mistral's
    files call themselves llama and are the same."""
    types: dict[str, str] = {}
    for model_type, family in FAMILIES.items():
        types.setdefault(family.gguf_architecture, model_type)
    return types
