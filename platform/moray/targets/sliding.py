"""Attention masks of layers with a sliding window: the mask of the pass, limited to the last `window` positions.

A query at position i sees keys at positions j with i - window < j <= i. A window applies to positions, not slots: a
tree's nodes are side by side in the cache, and those of one level share a position. So every cache reports the
positions of the tokens in its slots (`place`).

Only the target's own layers are limited to its windows, wherever they run. What a drafter's own attention reads (its
keys and values, and those of the target that it remembers) may be any number of positions back.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.targets.spec import TargetSpec
from moray.targets.visibility import Visible, Window

LayerMask = Visible | Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None
"""See `Target.forward`; training uses a rule instead of a mask."""


@runtime_checkable
class PlacesTokens(Protocol):
    """A cache that knows the positions of the tokens in its slots."""

    def place(self, positions: Int[Tensor, "batch new"]) -> Int[Tensor, "batch slots"]:
        """Store the positions of the tokens that the next pass writes; return those of all slots that it sees."""
        ...


class LayerMasks:
    """Derives the mask of each layer of a target from the mask of a whole pass."""

    def __init__(self, spec: TargetSpec) -> None:
        self._window = spec.sliding_window
        self._sliding = frozenset(spec.sliding_layers)

    def of_pass(
        self, layers: Sequence[int], mask: LayerMask, positions: Int[Tensor, "batch new"], cache: object
    ) -> list[LayerMask]:
        """The masks of some layers, given by their numbers in the target; `mask` itself for layers without a window.

        `mask` is the mask for layers with full attention. If a layer has a window and `mask` is a tensor, or only one
        token is new, `cache` must be a `PlacesTokens`.
        """
        if self._window is None or self._sliding.isdisjoint(layers):
            return [mask] * len(layers)
        near = _within(self._window, mask, positions, cache)
        return [near if layer in self._sliding else mask for layer in layers]


def _within(window: int, mask: LayerMask, positions: Int[Tensor, "batch new"], cache: object) -> LayerMask:
    if isinstance(mask, Visible):
        return mask.within(window)
    new = positions.shape[1]
    if mask is None and new > 1:  # whole sequences with causal attention
        return None if new <= window else _causal(new, positions.device).within(window)
    assert isinstance(cache, PlacesTokens)
    placed = cache.place(positions)
    if placed.shape[1] <= window:  # no position can be further back than there are slots
        return mask
    is_near = (placed[:, None] > positions[..., None] - window)[:, None]
    if mask is None:
        return is_near
    return mask & is_near if mask.dtype == torch.bool else torch.where(is_near, mask, -torch.inf)


def _causal(length: int, device: torch.device) -> Visible:
    return Visible((Window(None, torch.arange(1, length + 1, device=device)[None]),))
