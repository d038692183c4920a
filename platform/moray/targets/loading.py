"""Loads weights so that none is made up: every tensor is there, has the right shape, and is finite.

transformers fills in random numbers for tensors that a checkpoint lacks, and drops those that the model has no place
for. Here both are errors that name the tensor.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from moray.errors import ConfigError, MorayError
from moray.explain import one_line
from moray.targets.attention import attention_backend
from moray.targets.spec import resolve_folder
from moray.targets.stored import FLOATS, StoredTensor, check_rope_type, read_model_config, stored_tensors

_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|(^|\.)position_ids|\.(attn|attention)\.(bias|masked_bias))$")
"""Buffers that old checkpoints hold but the model computes itself: rotary frequencies and causal masks."""

TIED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
"""The input and output embeddings of a target."""
UNTIED = "tie_word_embeddings is true in its config.json, but its input and output embeddings differ: set it to false"

Shapes = Mapping[str, Sequence[int]]


def load_causal_lm(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None = None,
    field: str = "target.model",
) -> Any:
    """Load an unmodified Hugging Face causal LM with exactly the weights of its checkpoint.

    Args:
        model: folder or hub name.
        dtype: of the weights.
        device: where to load it.
        attention: transformers' name of the attention; None for its own choice.
        field: the configuration field that names the model, for errors.

    Raises:
        ConfigError: the model cannot be loaded, or a tensor is missing, unexpected, quantised, not finite or of the
            wrong shape.
    """
    folder = resolve_folder(model, field=field)
    check_rope_type(read_model_config(folder, model, field), model, field)
    stored = stored_tensors(folder, field)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        with _silent():
            answer: Any = AutoModelForCausalLM.from_pretrained(  # a pair, which its annotation does not say
                folder,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **options,
            )
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"{field} '{model}' cannot be loaded: {type(error).__name__}: {one_line(str(error))}"
        ) from None
    loaded, info = answer
    misshapen = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]}
    problem = _describe(info["missing_keys"], _not_computed(info["unexpected_keys"]), misshapen)
    problem = problem or _quantised(stored, {name for name, _ in loaded.named_parameters()}) or _untied(loaded)
    if not problem:
        loaded = loaded.to(device)
        problem = describe_nonfinite(loaded.state_dict().items())
    if problem:
        raise ConfigError(f"{field} '{model}': {with_advice(problem)}")
    return loaded


@dataclass(frozen=True)
class WeightSource:
    """Where the weights of a hollow model come from."""

    read: Callable[[str], Tensor]
    """Returns a tensor by its name in the target."""
    dtype: torch.dtype
    device: torch.device
    refuse: Callable[[str], MorayError]
    """Builds the error for a problem with a tensor."""


def hollow_model(model_config: Any, source: WeightSource) -> Any:
    """The target's modules without weights, on torch's meta device, to be filled with some of them."""
    backend = attention_backend(source.device.type)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(model_config, dtype=source.dtype, attn_implementation=backend)
    except (ValueError, TypeError, LookupError, RuntimeError, ImportError) as error:
        raise source.refuse(f"its config.json cannot be used: {type(error).__name__}: {one_line(str(error))}") from None
    # The rotary tables are not weights: they are computed, and a meta device cannot hold them.
    model.model.rotary_emb = type(model.model.rotary_emb)(model_config).to(source.device)
    return model


def refuse_target(model: str, problem: str) -> ConfigError:
    """The error for a problem with a tensor of the target."""
    return ConfigError(f"target.model '{model}': {with_advice(problem)}")


def check_stored(stored: Mapping[str, StoredTensor], model: Any, source: str) -> None:
    """Compare the contents of a checkpoint with what a model needs, by headers and shapes alone.

    Args:
        stored: tensors of the checkpoint.
        model: a causal LM of transformers, which may be on the meta device.
        source: field and name of the checkpoint, for errors.

    Raises:
        ConfigError: a tensor is missing, unexpected, quantised or of the wrong shape.
    """
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:  # one of the two is enough
        absent = TIED - stored.keys()
        wanted = {name: shape for name, shape in wanted.items() if name not in absent or absent == TIED}
    found = {name: tensor.shape for name, tensor in stored.items() if name in wanted or not _COMPUTED.search(name)}
    problem = describe_difference(found, wanted) or _quantised(stored, wanted)
    if problem:
        raise ConfigError(f"{source}: {with_advice(problem)}")


def describe_difference(found: Shapes, wanted: Shapes) -> str:
    """Which tensor is missing, unexpected or of the wrong shape, and how many more are; empty if there is no
    difference."""
    misshapen = {
        name: (tuple(found[name]), tuple(shape))
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    }
    return _describe(wanted.keys() - found.keys(), found.keys() - wanted.keys(), misshapen)


def describe_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Which tensor holds a number that is not finite; empty if there is none. Makes one pass over the tensors."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            least, most = torch.aminmax(tensor)
            if not bool(torch.isfinite(least) & torch.isfinite(most)):
                what = "NaN" if bool(torch.isnan(least) | torch.isnan(most)) else "infinity"
                return f"tensor '{name}' holds {what} (in {str(tensor.dtype).removeprefix('torch.')})"
    return ""


def with_advice(problem: str) -> str:
    """Add to a checkpoint's problem what to do about it."""
    if problem == UNTIED:  # already says what to do
        return problem
    if problem.endswith("(in float16)"):
        return f"{problem}; if the checkpoint itself is finite, load it with dtype bfloat16 or float32"
    return f"{problem}; fetch or save the model again"


def _describe(
    missing: Collection[str],
    unexpected: Collection[str],
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> str:
    problems = [f"tensor '{name}' is missing" for name in sorted(missing)]
    problems += [
        f"tensor '{name}' has the shape {list(found)}; {list(wanted)} is accepted"
        for name, (found, wanted) in sorted(misshapen.items())
    ]
    problems += [f"tensor '{name}' is unexpected: the model has no place for it" for name in sorted(unexpected)]
    more = f" (and {len(problems) - 1} more such tensors)" if len(problems) > 1 else ""
    return problems[0] + more if problems else ""


def _not_computed(names: Iterable[str]) -> list[str]:
    return [name for name in names if not _COMPUTED.search(name)]


def _quantised(stored: Mapping[str, StoredTensor], parameters: Collection[str]) -> str:
    """Which weight is not stored as plain floating-point numbers; empty if there is none."""
    for name in sorted(stored.keys() & set(parameters)):
        if stored[name].dtype not in FLOATS:
            return f"tensor '{name}' is stored as {stored[name].dtype}; accepted are {', '.join(FLOATS)}"
    return ""


def _untied(loaded: Any) -> str:
    """The problem if the configuration ties the embeddings but transformers did not, because they differ; otherwise
    empty."""
    ours, theirs = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    if loaded.config.get_text_config().tie_word_embeddings and ours is not None and ours.weight is not theirs.weight:
        return UNTIED
    return ""


@contextmanager
def _silent() -> Iterator[None]:
    """Turn off transformers' progress bar and its table of missing tensors."""
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
