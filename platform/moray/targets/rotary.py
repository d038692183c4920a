"""The target's own rotary tables, computed once per position instead of once per pass."""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SPARE_POSITIONS = 64
"""Drafts may run past the end of the context by the maximum depth of a tree."""


class Rotation(tuple[Tensor, Tensor]):
    """Cosines and sines of one pass, [batch, new, head_dim] each: the pair that transformers' layers take.

    Fused layers use `turn`, whose operands are computed once for all layers of the pass.
    """

    def turn(self, x: Float[Tensor, "batch heads new head_dim"]) -> Float[Tensor, "batch heads new head_dim"]:
        """Rotate the first half of each head against its second half."""
        cos, signed_sin = self._operands
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), signed_sin)

    @cached_property
    def _operands(self) -> tuple[Float[Tensor, "batch 1 new head_dim"], Float[Tensor, "batch 1 new head_dim"]]:
        """Cosines, and sines that are negated for the first half, whose features rotate the other way."""
        cos, sin = self
        first, second = sin.chunk(2, dim=-1)
        return cos[:, None], torch.cat([first.neg(), second], dim=-1)[:, None]


class RotaryCache:
    """Cosines and sines of a model's rotary module, of a type in `targets.spec.ROPE_TYPES`.

    A module of type "dynamic" recomputes every rotation once a position is past the context. Only drafts reach such
    positions, and none of those can be accepted, so they get the last position's rotation and the others keep theirs.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(self, like: Float[Tensor, "*any"], positions: Int[Tensor, "batch new"]) -> Rotation:
        """Cosines and sines for `positions`, in the dtype and on the device of `like`."""
        if self._tables is None or self._tables[0].dtype != like.dtype or self._tables[0].device != like.device:
            context = self._module.config.max_position_embeddings
            asked = torch.arange(context + _SPARE_POSITIONS, device=like.device)
            if self._module.rope_type == "dynamic":
                asked = asked.clamp(max=context - 1)
            cos, sin = self._module(like, asked[None])
            self._tables = cos[0], sin[0]
        cos, sin = self._tables
        return Rotation((cos[positions], sin[positions]))
