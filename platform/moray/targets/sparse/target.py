"""A sparse target: `Target` whose layers with routers compute only the tokens that run through them.

A pass reads the weights of a layer only if one of its tokens runs through it. Every token of a pass, also every node of
a draft tree, has routes of its own, which depend on nothing but the tokens before it. So verifying a tree gives the
text that plain decoding of the same target gives; that text is not the dense model's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
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

_MAX_COUNTED = 64
"""Passes over more tokens than a draft has read a prompt."""


@dataclass
class PassCounts:
    """What passes over few tokens have read. To count an answer alone, replace it once the prompt has been read."""

    num_passes: int = 0
    num_layers: int = 0
    """Layers of those passes, read or not."""
    num_layers_read: int = 0
    """Layers whose weights were read, because a token ran through them."""
    num_rows: int = 0
    """Tokens of those passes, times layers."""
    num_rows_run: int = 0
    """How many of them ran."""
    num_tokens: int = 0
    """Tokens of those passes."""
    num_kept: int = 0
    """How many of them no selection has dropped."""

    def record(self, numbers: Sequence[int], num_new: int, num_kept: int | None = None) -> None:
        """Record a pass.

        Args:
            numbers: of tokens that each layer has computed.
            num_new: number of new tokens.
            num_kept: how many of them a selection has kept; None for all.
        """
        self.num_tokens += num_new
        self.num_kept += num_new if num_kept is None else num_kept
        self.num_passes += 1
        self.num_layers += len(numbers)
        self.num_layers_read += sum(number > 0 for number in numbers)
        self.num_rows += len(numbers) * num_new
        self.num_rows_run += sum(numbers)

    def add(self, other: "PassCounts") -> None:
        """Add other passes."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def layers_read(self) -> float:
        """Share of the layers that a pass reads; 1 without a pass."""
        return self.num_layers_read / self.num_layers if self.num_layers else 1.0

    @property
    def kept_nodes(self) -> float:
        """Mean number of tokens in a pass that are verified: the root, and the nodes that are not dropped."""
        return self.num_kept / self.num_passes if self.num_passes else 1.0

    @property
    def rows_run(self) -> float:
        """Share of the tokens that a layer computes; 1 without a pass."""
        return self.num_rows_run / self.num_rows if self.num_rows else 1.0


@dataclass(frozen=True)
class Selection:
    """Which tokens of a pass go on at a layer."""

    layer: int
    choose: Callable[[Float[Tensor, "new hidden"]], list[int]]
    """The tokens to keep, given what enters the layer: in order, and none without those that it sees."""


class SparseTarget(Target):
    """A target with routers."""

    def __init__(
        self,
        model: nn.Module,
        spec: TargetSpec,
        eos_ids: tuple[int, ...],
        routers: Mapping[int, Router],
        folder: Path,
    ) -> None:
        """
        Args:
            model: the dense model.
            spec: with its routing.
            eos_ids: tokens that end an answer.
            routers: by layer.
            folder: where it lies; other files about the target may lie there too.
        """
        super().__init__(model, spec, eos_ids)
        if spec.sliding_window is not None:
            raise ConfigError("a sparse target with sliding windows is not supported: give a target without them")
        assert spec.routing is not None
        self._initial = spec.routing.initial_tokens
        self.routers = {layer: router.to(self.device) for layer, router in routers.items()}
        """By layer."""
        self.folder = folder
        self.counts = PassCounts()
        """Of passes over at most `_MAX_COUNTED` tokens of one sequence."""

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
        selection: Selection | None = None,
    ) -> TargetOutput:
        """See `Target.forward`. A cache that is no `RoutedCache` must be empty, and sees whole sequences.

        `selection` drops tokens of a single sequence at one layer: they skip all layers from there on, and what is
        returned for them means nothing.
        """
        model, num_layers = self.model.model, self.spec.num_layers
        hidden = model.embed_tokens(tokens)
        rotary = self._rotary.at(hidden, positions)
        always = positions < self._initial
        has_initial = bool(always.any())
        everywhere = torch.ones_like(always)
        routed: Any = cache if isinstance(cache, RoutedCache) else WholeSequences(cache)
        routed.begin()
        whole = _Pass(positions, rotary, _additive(mask, hidden), routed)
        routes: list[Bool[Tensor, "batch new"]] = []
        numbers: list[int] = []
        kept: dict[int, Tensor] = {}
        selected: list[int] | None = None
        for index in range(num_layers):
            if index - num_layers - 1 in hidden_depths:
                kept[index - num_layers - 1] = hidden
            if selection is not None and index == selection.layer:
                selected = selection.choose(hidden[0])
                everywhere = torch.zeros_like(everywhere)
                everywhere[0, selected] = True
                always = always & everywhere
            router = self.routers.get(index)
            if router is None:
                runs = everywhere
            else:
                runs = router.margin(hidden) > 0
                runs = always | runs if has_initial else runs
                runs = everywhere & runs if selected is not None else runs
            is_whole = router is None and selected is None
            num_run = runs.numel() if is_whole else int(runs.sum())  # waits for the device
            routes.append(runs)
            numbers.append(num_run)
            if num_run:
                hidden = self._run(index, hidden, runs, num_run, whole)
        if tokens.shape[0] == 1 and tokens.shape[1] <= _MAX_COUNTED:
            self.counts.record(numbers, tokens.shape[1], None if selected is None else len(selected))
        last = model.norm(hidden)
        if -1 in hidden_depths:
            kept[-1] = last
        return TargetOutput(last, kept, torch.stack(routes), selected)

    def _run(
        self,
        index: int,
        hidden: Float[Tensor, "batch new hidden"],
        runs: Bool[Tensor, "batch new"],
        num_run: int,
        whole: "_Pass",
    ) -> Float[Tensor, "batch new hidden"]:
        """Run one layer. Of a single sequence it computes only the tokens that run; of several, all tokens, and drops
        the others' results."""
        is_all = num_run == runs.numel()
        is_one = runs.shape[0] == 1 and not isinstance(whole.cache, WholeSequences)
        rows = runs[0].nonzero()[:, 0] if is_one and not is_all else None
        mask = whole.cache.enter(index, rows, runs, whole.mask)
        if rows is None:
            out = self._layer(index, hidden, whole, mask)
            return out if is_all else torch.where(runs[..., None], out, hidden)
        cos, sin = whole.rotary
        own = replace(whole, positions=whole.positions[:, rows], rotary=Rotation((cos[:, rows], sin[:, rows])))
        return hidden.index_copy(1, rows, self._layer(index, hidden[:, rows], own, mask))

    def _layer(self, index: int, hidden: Tensor, whole: "_Pass", mask: Tensor | None) -> Tensor:
        return self.model.model.layers[index].forward(
            hidden,
            attention_mask=mask,
            position_ids=whole.positions,
            past_key_values=whole.cache,
            use_cache=True,
            position_embeddings=whole.rotary,
        )


@dataclass(frozen=True)
class _Pass:
    """What all layers of a pass share."""

    positions: Int[Tensor, "batch some"]
    """Of the tokens that are computed; `rotary` too."""
    rotary: Rotation
    mask: Float[Tensor, "#batch 1 new slots"] | None
    cache: Any


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
