"""Keys and values of many sequences of different lengths, each in a row of its own.

Where `targets.kv_cache.KVCache` has one length for all of its sequences, here every row has its own, so that a row
can be handed to another sequence while its neighbours go on. The memory is a fixed number of slots, cut into
as many rows of as many slots as its sequences need at the moment.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from moray.targets.kv_cache import KVCache
from moray.targets.model import Target

GRAIN = 64
"""Widths are multiples of this many slots: sequences of nearly the same length do not each ask for new rows."""


class RowCache(Cache):
    """One new token for each of the first rows per forward pass; the slot is the token's position.

        slot      0  1  2  3  4  5
        row 0     a  b  c  d  .  .    its next token goes to slot 4
        row 1     e  f  .  .  .  .    its next token goes to slot 2
        row 2     (free)

    A mask must hide every slot behind a row's own: they hold zeros, or what earlier sequences left.
    """

    def __init__(self, target: Target, num_slots: int) -> None:
        """`num_slots` are allocated here, and nothing later."""
        super().__init__(layers=[])
        spec = target.spec
        like = target.model.lm_head.weight
        self._heads, self._head_dim = spec.num_kv_heads, spec.head_dim
        self._memory = torch.zeros(
            spec.num_layers, 2, num_slots * self._heads * self._head_dim, dtype=like.dtype, device=like.device
        )
        self._views: list[Tensor] = []
        self.num_slots = num_slots
        self.num_rows = 0
        self.width = 0
        """Slots of a row."""
        self._rows: Int[Tensor, " rows"] = torch.zeros(0, dtype=torch.long)
        self._slots: Int[Tensor, " rows"] = self._rows
        self._seen = 0

    def arrange(self, width: int, kept_rows: int, kept_slots: int) -> None:
        """Cut the memory into rows of `width` slots; the first rows keep the first slots of what they hold.

        One layer at a time, so that the copy needs little memory.
        """
        num_rows = self.num_slots // width
        shape = (2, num_rows, self._heads, width, self._head_dim)
        size = num_rows * self._heads * width * self._head_dim
        views: list[Tensor] = []
        for index, memory in enumerate(self._memory):
            kept = self._views[index][:, :kept_rows, :, :kept_slots].clone() if kept_rows else None
            views.append(memory[:, :size].view(shape))
            if kept is not None:
                views[-1][:, :kept_rows, :, :kept_slots] = kept
        self._views, self.num_rows, self.width = views, num_rows, width

    def fill(self, first_row: int, cache: KVCache) -> None:
        """Copy sequences that were read elsewhere into the rows from `first_row` on."""
        batch, length = cache.data.shape[2], cache.length
        for view, read in zip(self._views, cache.data, strict=True):
            view[:, first_row : first_row + batch, :, :length] = read[..., :length, :]

    def move(self, sources: Sequence[int], destinations: Sequence[int], num_slots: int) -> None:
        """Copy the first slots of some rows to other rows, which no source is among."""
        device = self._memory.device
        from_rows, to_rows = torch.tensor(sources, device=device), torch.tensor(destinations, device=device)
        for view in self._views:
            view[:, to_rows, :, :num_slots] = view[:, from_rows, :, :num_slots]

    def aim(self, slots: Int[Tensor, " rows"], num_seen: int) -> None:
        """Say where the next pass writes, row by row, and how many slots it looks at."""
        self._rows = torch.arange(slots.shape[0], device=slots.device)
        self._slots, self._seen = slots, num_seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return views of what the pass looks at."""
        key, value = self._views[layer_idx]
        key[self._rows, :, self._slots] = key_states[:, :, 0]
        value[self._rows, :, self._slots] = value_states[:, :, 0]
        batch = key_states.shape[0]
        return key[:batch, :, : self._seen], value[:batch, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many slots the next pass looks at."""
        return self._seen
