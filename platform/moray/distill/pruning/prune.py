"""Cuts a drafter out of a target: its most important layers, heads, MLP channels and hidden dimensions.

The result has exactly the shape that was asked for. It must then be distilled (`init.drafter`): without the parts that
were cut it drafts badly.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from moray.distill.pruning.config import PruneConfig
from moray.distill.pruning.importance import Importance, measure_importance
from moray.drafters.checkpoint import save_drafter
from moray.drafters.common.hugging_face import LAYER_TENSORS, layer_state
from moray.drafters.configs import IndependentConfig
from moray.drafters.independent import Independent
from moray.errors import ConfigError, DataError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetSpec, read_spec, resolve_folder
from moray.targets.stored import read_model_config, stored_tensors

_LOGGER = logging.getLogger(__name__)


def check_prunable(config: PruneConfig) -> TargetSpec:
    """The target's sizes; refuses what cannot be cut out of it.

    Raises:
        ConfigError: the drafter is larger than the target in something, or the target has parts that a drafter lacks.
        DataError: the output exists.
    """
    output = Path(config.output)
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise DataError(f"output '{output}' exists; name another folder, or remove it")
    if config.target.tensor_parallel > 1:
        raise ConfigError(
            f"target.tensor_parallel is {config.target.tensor_parallel}; a target is pruned in one process"
        )
    spec, shape = read_spec(config.target.model), config.drafter
    _check_parts(spec, config.target.model)
    sizes = {
        "num_layers": (shape.num_layers, spec.num_layers),
        "hidden_size": (shape.hidden_size, spec.hidden_size),
        "layer.num_kv_heads": (shape.layer.num_kv_heads, spec.num_kv_heads),
        "layer.intermediate_size": (shape.layer.intermediate_size, spec.intermediate_size),
    }
    for key, (given, most) in sizes.items():
        if given > most:
            raise ConfigError(f"drafter.{key} is {given}, and the target's is {most}: give at most that")
    group, most = shape.layer.num_heads / shape.layer.num_kv_heads, spec.num_heads // spec.num_kv_heads
    if group > most:
        raise ConfigError(
            f"drafter.layer has {group:g} query heads for each key/value head, and the target {most}: give at most that"
        )
    if shape.head_dim != spec.head_dim:
        raise ConfigError(f"drafter.head_dim is {shape.head_dim}; heads are kept whole, so {spec.head_dim} is accepted")
    if shape.embeddings == "frozen" and shape.hidden_size != spec.hidden_size:
        raise ConfigError(
            f"drafter.embeddings is frozen, but drafter.hidden_size {shape.hidden_size} is not the target's "
            f"{spec.hidden_size}: give drafter.embeddings=random, whose own embeddings then start as parts of "
            "the target's"
        )
    if config.layers is not None and config.layers[-1] >= spec.num_layers:
        raise ConfigError(f"layers has {config.layers[-1]}; the target's are 0 to {spec.num_layers - 1}")
    return spec


def _check_parts(spec: TargetSpec, model: str) -> None:
    """Refuse a target whose layers have what those of a drafter lack."""
    if spec.routing is not None:
        raise ConfigError("target.model is sparse, whose layers are trained to be skipped: give the dense target")
    if spec.sliding_window is not None:
        raise ConfigError("target.model has sliding windows, which drafters lack: give a target without them")
    folder = resolve_folder(model)
    for name in stored_tensors(folder):
        kind = name.removeprefix("model.layers.").partition(".")[2]
        if name.startswith("model.layers.") and kind not in LAYER_TENSORS and not name.endswith("inv_freq"):
            raise ConfigError(f"target.model has '{name}', which the layers of a drafter lack: it cannot be pruned")
    activation = getattr(read_model_config(folder, model), "hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"target.model has hidden_act '{activation}', and a drafter silu: it cannot be pruned")
    if spec.rope_scaling != "default":
        _LOGGER.warning("the target's rotary embedding is scaled, the drafter's is not; training has to make up for it")


def prune(
    config: PruneConfig,
    chats: Iterable[Sequence[int]],
    counts: Int[Tensor, " vocab"],
    text_fingerprint: str,
    on_chat: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    """Write a drafter of the target's most important parts; returns the layers that it keeps.

    Args:
        config: checked by `check_prunable`.
        chats: token ids, by which importance is measured.
        counts: occurrences of each token, by which a reduced draft vocabulary is chosen.
        text_fingerprint: of the tokenizer and chat template.
        on_chat: called after each chat.
    """
    target = Target.load(config.target, packs=False)
    importance = measure_importance(target, chats, on_chat)
    layers = config.layers or _top(importance.layers, config.drafter.num_layers)
    drafter = Independent(config.drafter, TargetHead.of(target))
    if config.drafter.draft_vocab_size is not None:
        drafter.choose_vocabulary(counts)
    _fill(drafter, config.drafter, target, importance, layers)
    save_drafter(Path(config.output), drafter, text_fingerprint)
    return tuple(layers)


def _top(importance: Tensor, count: int) -> tuple[int, ...]:
    """The most important ones, in order."""
    return tuple(sorted(importance.topk(count).indices.tolist()))


@torch.no_grad()
def _fill(
    drafter: Independent, shape: IndependentConfig, target: Target, importance: Importance, layers: Sequence[int]
) -> None:
    tensors = target.model.state_dict()
    hidden = torch.tensor(_top(importance.hidden, shape.hidden_size))
    drafter.norm.weight.copy_(tensors["model.norm.weight"][hidden])
    if drafter.embedding is not None and drafter.projection is not None:
        drafter.embedding.weight.copy_(tensors["model.embed_tokens.weight"][:, hidden])
        head = drafter.vocabulary.select(tensors["lm_head.weight"].T).T
        drafter.projection.weight.copy_(head[:, hidden])
    spec, width = target.spec, shape.head_dim
    for block, number in zip(drafter.blocks, layers, strict=True):
        heads, groups = _heads(importance.heads[number], spec, shape)
        channels = torch.tensor(_top(importance.channels[number], shape.layer.intermediate_size))
        rows = {
            "q_proj": _elements(heads, width),
            "k_proj": _elements(groups, width),
            "v_proj": _elements(groups, width),
            "gate_proj": channels,
            "up_proj": channels,
        }
        columns = {"o_proj": _elements(heads, width), "down_proj": channels}
        read = partial(_read_part, tensors, f"model.layers.{number}.", hidden, rows, columns)
        block.load_state_dict(layer_state(read, width))


def _read_part(
    tensors: Mapping[str, Tensor],
    prefix: str,
    hidden: Tensor,
    rows: Mapping[str, Tensor],
    columns: Mapping[str, Tensor],
    name: str,
) -> Tensor:
    """The kept part of a layer's tensor: rows and columns by the name of its module, `hidden` for all others."""
    tensor, kind = tensors[prefix + name].float(), name.split(".")[-2]
    if tensor.ndim == 1:
        return tensor[hidden]
    return tensor[hidden][:, columns[kind]] if kind in columns else tensor[rows[kind]][:, hidden]


def _heads(importance: Tensor, spec: TargetSpec, shape: IndependentConfig) -> tuple[list[int], list[int]]:
    """Query heads and key/value heads to keep: whole groups first, then equally many heads of each."""
    group = spec.num_heads // spec.num_kv_heads
    by_group = importance.view(spec.num_kv_heads, group)
    kept = shape.layer.num_heads // shape.layer.num_kv_heads
    groups = _top(by_group.topk(kept).values.sum(-1), shape.layer.num_kv_heads)
    return [number * group + head for number in groups for head in _top(by_group[number], kept)], list(groups)


def _elements(heads: Sequence[int], width: int) -> Tensor:
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
