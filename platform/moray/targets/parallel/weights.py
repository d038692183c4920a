"""Reads one rank's part of a target's weights; nothing else of them is read.

torch's `parallelize_module` splits a module that is already loaded, so every rank would first hold the whole target;
with its DTensor weights a pass of one token also took several times as long (125 against 21 to 58 ms on two CPU
processes). So the split is that of its Colwise and Rowwise plans, with plain tensors.
"""

from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from moray.targets.loading import (
    TIED,
    UNTIED,
    WeightSource,
    check_stored,
    describe_nonfinite,
    hollow_model,
    refuse_target,
)
from moray.targets.parallel.group import RankGroup
from moray.targets.parallel.linear import RowParallelLinear
from moray.targets.parallel.plan import RankPlan
from moray.targets.spec import TargetConfig, resolve_folder
from moray.targets.stored import StoredTensor, check_rope_type, read_model_config, stored_tensors


def load_part(config: TargetConfig, plan: RankPlan, device: torch.device) -> Any:
    """A model of transformers with one rank's part of every layer, which has yet to be connected (`connect`).

    Raises:
        ConfigError: a tensor of the target, needed or not, is missing, unexpected or of the wrong shape, or one of this
            rank's is not finite.
    """
    folder = resolve_folder(config.model)
    model_config = read_model_config(folder, config.model)
    check_rope_type(model_config, config.model, "target.model")
    stored = stored_tensors(folder)
    refuse = partial(refuse_target, config.model)
    part = _StoredPart(stored, plan, device)
    source = WeightSource(part.read, getattr(torch, config.dtype), device, refuse)
    model = hollow_model(model_config, source)
    check_stored(stored, model, f"target.model '{config.model}'")
    if model_config.tie_word_embeddings and stored.keys() >= TIED and plan.rank == 0:
        whole = _StoredPart(stored, None, device)
        if not torch.equal(*(whole.read(name) for name in sorted(TIED))):
            raise refuse(UNTIED)
    _shrink(model, plan)
    for name, tensor in list(model.state_dict().items()):
        own = source.read(name).to(source.dtype)
        assert own.shape == tensor.shape, name
        problem = describe_nonfinite([(name, own)])
        if problem:
            raise refuse(problem)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(own, requires_grad=False))
    return model


def connect(model: Any, group: RankGroup) -> None:
    """Let the layers of a rank's model sum their outputs over the ranks of `group`."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.sum_ranks = group.all_reduce


class _StoredPart:
    """Reads a rank's part of stored tensors; `plan` None reads them whole."""

    def __init__(self, stored: dict[str, StoredTensor], plan: RankPlan | None, device: torch.device) -> None:
        self._stored, self._plan, self._device = stored, plan, str(device)

    def read(self, name: str) -> Tensor:
        """A tensor by its name in the target; tied embeddings may be stored under one of their names."""
        there = next(one for one in (name, *sorted(TIED)) if one in self._stored)
        part = None if self._plan is None else self._plan.part_of(name)
        with safe_open(self._stored[there].path, framework="pt", device=self._device) as file:
            if part is None:
                return file.get_tensor(there)
            dim, own = part
            slices = file.get_slice(there)
            return slices[own.start : own.stop] if dim == 0 else slices[:, own.start : own.stop].contiguous()


def _shrink(model: Any, plan: RankPlan) -> None:
    """Give every module the shape of this rank's part."""
    inner = model.model
    if plan.rank != 0:
        inner.embed_tokens = nn.Identity()  # receives hidden states
    model.lm_head = _column(model.lm_head, len(plan.vocabulary))
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, _column(getattr(mlp, name), len(plan.intermediate)))
        mlp.down_proj = _row(mlp.down_proj, len(plan.intermediate), plan)
        if plan.splits_attention:
            queries, keys = (len(heads) * plan.head_dim for heads in (plan.query_heads, plan.kv_heads))
            attention.q_proj = _column(attention.q_proj, queries)
            attention.k_proj, attention.v_proj = _column(attention.k_proj, keys), _column(attention.v_proj, keys)
            attention.o_proj = _row(attention.o_proj, queries, plan)
            attention.num_key_value_groups = len(plan.query_heads) // len(plan.kv_heads)


def _column(whole: nn.Linear, num_outputs: int) -> nn.Linear:
    weight = whole.weight
    return nn.Linear(whole.in_features, num_outputs, whole.bias is not None, weight.device, weight.dtype)


def _row(whole: nn.Linear, num_inputs: int, plan: RankPlan) -> RowParallelLinear:
    return RowParallelLinear(whole, num_inputs, whole.bias is not None and plan.rank == 0, _alone)


def _alone(tensor: Tensor) -> Tensor:
    raise AssertionError("this part of a target is not connected to the other ranks")
