"""A sparse target: `Target` whose layers with routers compute only the tokens that run through them.

A pass reads the weights of a layer only if one of its tokens runs through it. Every token of a pass, also every node of
a draft tree, has routes of its own, which depend on nothing but the tokens before it. So verifying a tree gives the
text that plain decoding of the same target gives; that text is not the dense model's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from moray.errors import ConfigError
from moray.targets.model import Target, TargetOutput
from moray.targets.rotary import Rotation
from moray.targets.sparse.cache import RoutedCache, SparseCache, WholeSequences
from moray.targets.sparse.routing import Router
from moray.targets.spec import TargetSpec


class SparseTarget(Target):
    """A target with routers."""

    def __init__(
        self, model: nn.Module, spec: TargetSpec, eos_ids: tuple[int, ...], routers: Mapping[int, Router]
    ) -> None:
        """
        Args:
            model: the dense model.
            spec: with its routing.
            eos_ids: tokens that end an answer.
            routers: by layer.
        """
        super().__init__(model, spec, eos_ids)
        if spec.sliding_window is not None:
            raise ConfigError("a sparse target with sliding windows is not supported: give a target without them")
        assert spec.routing is not None
        self._initial = spec.routing.initial_tokens
        self.routers = {layer: router.to(self.device) for layer, router in routers.items()}
        """By layer."""

    def new_cache(self, capacity: int, batch: int = 1) -> Any:
        """An empty cache for one sequence; for several, one that takes whole sequences in a single pass."""
        if batch > 1:
            return super().new_cache(capacity, batch)
        return SparseCache(self.spec, capacity, self.model.lm_head.weight)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, "batch new"],
        positions: Int[Tensor, "batch new"],
        mask: Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None,
        cache: Cache,
        hidden_depths: Sequence[int] = (),
    ) -> TargetOutput:
        """See `Target.forward`. A cache that is no `RoutedCache` must be empty, and sees whole sequences."""
        model, num_layers = self.model.model, self.spec.num_layers
        hidden = model.embed_tokens(tokens)
        rotary = self._rotary.at(hidden, positions)
        always = positions < self._initial
        routed: Any = cache if isinstance(cache, RoutedCache) else WholeSequences(cache)
        routed.begin()
        additive = _additive(mask, hidden)
        routes: list[Bool[Tensor, "batch new"]] = []
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(model.layers):
            if index - num_layers - 1 in hidden_depths:
                kept[index - num_layers - 1] = hidden
            router = self.routers.get(index)
            runs = torch.ones_like(always) if router is None else always | (router.margin(hidden) > 0)
            routes.append(runs)
            if router is not None and not bool(runs.any()):
                continue
            hidden = self._run(index, layer, hidden, positions, rotary, runs, additive, routed)
        last = model.norm(hidden)
        if -1 in hidden_depths:
            kept[-1] = last
        return TargetOutput(last, kept, torch.stack(routes))

    def _run(
        self,
        index: int,
        layer: Any,
        hidden: Float[Tensor, "batch new hidden"],
        positions: Int[Tensor, "batch new"],
        rotary: Rotation,
        runs: Bool[Tensor, "batch new"],
        mask: Float[Tensor, "#batch 1 new slots"] | None,
        cache: Any,
    ) -> Float[Tensor, "batch new hidden"]:
        """Run one layer. Of a single sequence it computes only the tokens that run; of several, all tokens, and drops
        the others' results."""
        is_one = runs.shape[0] == 1 and not isinstance(cache, WholeSequences)
        rows = runs[0].nonzero()[:, 0] if is_one else None
        own_mask = cache.enter(index, rows, runs, mask)
        if rows is None:
            out = self._layer(layer, hidden, positions, rotary, own_mask, cache)
            return torch.where(runs[..., None], out, hidden)
        turned = Rotation((rotary[0][:, rows], rotary[1][:, rows]))
        out = self._layer(layer, hidden[:, rows], positions[:, rows], turned, own_mask, cache)
        return out if rows.shape[0] == hidden.shape[1] else hidden.index_copy(1, rows, out)

    def _layer(
        self, layer: Any, hidden: Tensor, positions: Tensor, rotary: Rotation, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        return layer.forward(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=rotary,
        )


def _additive(
    mask: Tensor | None, hidden: Float[Tensor, "batch new hidden"]
) -> Float[Tensor, "#batch 1 new slots"] | None:
    """The mask as numbers to add; for several new tokens without one, each sees itself and those before it."""
    new = hidden.shape[1]
    if mask is None and new == 1:
        return None
    if mask is None:
        mask = torch.ones(1, 1, new, new, dtype=torch.bool, device=hidden.device).tril()
    if mask.dtype != torch.bool:
        return mask
    return hidden.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
