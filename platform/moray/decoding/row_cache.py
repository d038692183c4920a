"""Keys and values of many sequences of different lengths, each in a row of its own.

Where `targets.kv_cache.KVCache` has one length for all of its sequences, here every row has its own, so that a row
can be handed to another sequence while its neighbours go on. The memory is a fixed number of slots, cut into
as many rows of as many slots as its sequences need at the moment. How much of a row is a sequence's own is known to
whoever aims the passes.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from moray.targets.model import Target

GRAIN = 64
"""Widths are multiples of this many slots: sequences of nearly the same length do not each ask for new rows."""


class RowCache(Cache):
    """New tokens of each of the first rows per forward pass: one, at its position, or a tree's nodes side by side.

        slot      0  1  2  3  4  5
        row 0     a  b  c  d  .  .    its next token goes to slot 4, or the nodes of its tree to 4, 5, ...
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
        self.num_slots = num_slots
        self.num_rows = 0
        self.width = 0
        """Slots of a row."""
        self._data = self._cut(0, 0)
        self._rows: Int[Tensor, "rows 1"] = torch.zeros(0, 1, dtype=torch.long)
        self._slots: Int[Tensor, "rows new"] = self._rows
        self._first_row = self._seen = 0

    def _cut(self, num_rows: int, width: int) -> Tensor:
        """The memory as [layers, 2, rows, kv_heads, width, head_dim]."""
        shape = (num_rows, self._heads, width, self._head_dim)
        return self._memory[..., : num_rows * self._heads * width * self._head_dim].unflatten(-1, shape)

    def arrange(self, width: int, kept_rows: int, kept_slots: int) -> None:
        """Cut the memory into rows of `width` slots; the first rows keep the first slots of what they hold.

        One layer at a time, so that the copy needs little memory.
        """
        num_rows = self.num_slots // width
        data = self._cut(num_rows, width)
        for layer, before in zip(data, self._data, strict=True) if kept_rows else ():
            layer[:, :kept_rows, :, :kept_slots] = before[:, :kept_rows, :, :kept_slots].clone()
        self._data, self.num_rows, self.width = data, num_rows, width

    def reorder(self, moves: Mapping[int, int], num_slots: int) -> None:
        """Copy the first slots of whole rows to other rows, given which goes where; all are read before any is written.

        One layer at a time, so that the copy needs little memory.
        """
        if not moves:
            return
        device = self._memory.device
        sources, destinations = torch.tensor([*moves], device=device), torch.tensor([*moves.values()], device=device)
        for layer in self._data:
            layer[:, destinations, :, :num_slots] = layer[:, sources, :, :num_slots]

    def move(
        self, rows: Int[Tensor, " some"], sources: Int[Tensor, "some slots"], destinations: Int[Tensor, "some slots"]
    ) -> None:
        """Copy slots of some rows to other slots of the same rows: accepted nodes to where they belong.

        A slot may be source and destination, for all are read before any is written.
        """
        at = rows[:, None]
        self._data[:, :, at, :, destinations] = self._data[:, :, at, :, sources]

    def flat(
        self, rows: Int[Tensor, " some"], slots: Int[Tensor, "some new"], layers: Sequence[int]
    ) -> Float[Tensor, "some new layers width"]:
        """Keys and values of slots as a tap (see `KVCache.flat`): per token and layer, heads as [k_h ; v_h]."""
        index = torch.tensor(layers, device=self._memory.device)[:, None, None]
        window = self._data[index, :, rows[:, None], :, slots]  # [layers, some, new, 2, kv_heads, head_dim]
        return window.permute(1, 2, 0, 4, 3, 5).flatten(3)

    def aim(self, slots: Int[Tensor, "rows new"], num_seen: int, first_row: int = 0) -> None:
        """Say where the next pass writes, row by row from `first_row` on, and how many slots it looks at."""
        self._first_row = first_row
        self._rows = torch.arange(first_row, first_row + slots.shape[0], device=slots.device)[:, None]
        self._slots, self._seen = slots, num_seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return views of what the pass looks at."""
        key, value = self._data[layer_idx]
        key[self._rows, :, self._slots] = key_states.transpose(1, 2)
        value[self._rows, :, self._slots] = value_states.transpose(1, 2)
        rows = slice(self._first_row, self._first_row + key_states.shape[0])
        return key[rows, :, : self._seen], value[rows, :, : self._seen]

    def place(self, positions: Int[Tensor, "rows new"]) -> Int[Tensor, "rows slots"]:
        """The positions of all slots that the pass looks at: those of new tokens, and the numbers of all other slots,
        whose tokens are committed."""
        placed = torch.arange(self._seen, device=positions.device).repeat(positions.shape[0], 1)
        return placed.scatter_(1, self._slots, positions)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many slots the next pass looks at."""
        return self._seen
