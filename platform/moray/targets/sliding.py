"""Attention masks of layers with a sliding window: the mask of the pass, limited to the last `window` positions.

A query at position i sees keys at positions j with i - window < j <= i. A window follows positions, not slots: a tree's
nodes lie side by side in the cache, and those of one level share a position. So every cache says where the tokens in
its slots stand (`place`).

Only the target's own layers are held to its windows, wherever they run. What a drafter's own attention reads (its keys
and values, and those of the target that it remembers) may lie any number of positions back.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.targets.spec import TargetSpec
from moray.targets.visibility import Visible, Window

LayerMask = Visible | Bool[Tensor, "#batch 1 new slots"] | Float[Tensor, "#batch 1 new slots"] | None
"""See `Target.forward`; training has a rule in place of a mask."""


@runtime_checkable
class PlacesTokens(Protocol):
    """A cache that knows at which positions the tokens in its slots stand."""

    def place(self, positions: Int[Tensor, "batch new"]) -> Int[Tensor, "batch slots"]:
        """Note the positions of the tokens that the next pass writes; return those of all slots that it sees."""
        ...


class LayerMasks:
    """Masks for each of a target's layers out of the one for a whole pass."""

    def __init__(self, spec: TargetSpec) -> None:
        self._window = spec.sliding_window
        self._sliding = frozenset(spec.sliding_layers)

    def of_pass(
        self, layers: Sequence[int], mask: LayerMask, positions: Int[Tensor, "batch new"], cache: object
    ) -> list[LayerMask]:
        """The masks of some layers, by their numbers in the target: where nothing slides, `mask` as it is.

        `mask` is what a layer with full attention is given. Where a layer slides and `mask` is a tensor, or one token
        is new, `cache` is a `PlacesTokens`.
        """
        if self._window is None or self._sliding.isdisjoint(layers):
            return [mask] * len(layers)
        near = _within(self._window, mask, positions, cache)
        return [near if layer in self._sliding else mask for layer in layers]


def _within(window: int, mask: LayerMask, positions: Int[Tensor, "batch new"], cache: object) -> LayerMask:
    if isinstance(mask, Visible):
        return mask.within(window)
    new = positions.shape[1]
    if mask is None and new > 1:  # whole sequences, each token of which sees those before it
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
