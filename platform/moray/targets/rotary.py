"""The target's own rotary tables, asked once per position instead of once per pass."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_STATIC_KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds whose rotation of a position does not depend on how long the sequence has become."""


_SPARE_POSITIONS = 64
"""Drafts may run past the end of the context by as many levels as a tree can have."""


class RotaryCache:
    """Cosines and sines of a model's rotary module; kinds that change with the length are always recomputed."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._is_static = module.rope_type in _STATIC_KINDS
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(
        self, like: Float[Tensor, "*any"], positions: Int[Tensor, "batch new"]
    ) -> tuple[Float[Tensor, "batch new head_dim"], Float[Tensor, "batch new head_dim"]]:
        """Cosines and sines for `positions`, in the type and on the device of `like`."""
        if not self._is_static:
            return self._module(like, positions)
        if self._tables is None or self._tables[0].dtype != like.dtype or self._tables[0].device != like.device:
            count = self._module.config.max_position_embeddings + _SPARE_POSITIONS
            cos, sin = self._module(like, torch.arange(count, device=like.device)[None])
            self._tables = cos[0], sin[0]
        cos, sin = self._tables
        return cos[positions], sin[positions]
