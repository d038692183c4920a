"""Keys and values of many sequences of different lengths, each in a row of its own.

`targets.kv_cache.KVCache` has one length for all of its sequences. Here every row has its own length, so a row can be
given to another sequence while its neighbours go on. The memory is a fixed number of slots, divided into as many rows
of as many slots as the sequences currently need. The cache does not know how much of a row is filled; the code that
aims the passes does.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from moray.targets.kv_cache import Places
from moray.targets.model import Target

GRAIN = 64
"""Row widths are multiples of this many slots, so that slightly longer sequences do not each need a new layout."""


class BatchedKVCache(Cache):
    """Each forward pass writes new tokens to some rows: one token per row, or a tree's nodes side by side.

        slot      0  1  2  3  4  5
        row 0     a  b  c  d  .  .    its next token goes to slot 4, or the nodes of its tree to 4, 5, ...
        row 1     e  f  .  .  .  .    its next token goes to slot 2
        row 2     (free)

    A mask must hide every slot past a row's own tokens: those hold zeros, or remains of earlier sequences.
    """

    replayed_methods: ClassVar[frozenset[str]] = frozenset({"arrange", "reorder", "move", "aim"})
    gathered_methods: ClassVar[Mapping[str, int]] = {"flat": -1}
    """Both for split targets: see `targets.parallel.caches.Splittable`."""

    def __init__(self, target: Target, num_slots: int) -> None:
        """Allocates `num_slots`; nothing is allocated later."""
        super().__init__(layers=[])
        spec = target.spec
        like = target.model.lm_head.weight
        self._heads, self._head_dim = target.num_kv_heads, spec.head_dim
        self._memory = torch.zeros(
            spec.num_layers, 2, num_slots * self._heads * self._head_dim, dtype=like.dtype, device=like.device
        )
        self.num_layers = spec.num_layers
        self.num_slots = num_slots
        self.num_rows = 0
        self.width = 0
        """Slots per row."""
        self._data = self._cut(0, 0)
        self._layers: list[tuple[Tensor, Tensor]] = []
        """Keys and values of the rows of the next pass, by layer."""
        self._range = slice(0)
        """The rows of the next pass."""
        self._begin: int | None = None
        """First slot that the next pass writes, if it covers a single row: this needs no index tensors on the
        device."""
        self._index: tuple[Int[Tensor, "rows 1"], Int[Tensor, "rows new"]] | None = None
        """Rows and slots that the next pass writes, if `_begin` is None."""
        self._seen = 0

    def _cut(self, num_rows: int, width: int) -> Tensor:
        """The memory as [layers, 2, rows, kv_heads, width, head_dim]."""
        shape = (num_rows, self._heads, width, self._head_dim)
        return self._memory[..., : num_rows * self._heads * width * self._head_dim].unflatten(-1, shape)

    def arrange(self, width: int, kept_rows: int, kept_slots: int) -> None:
        """Divide the memory into rows of `width` slots; the first `kept_rows` rows keep their first `kept_slots` slots.

        It copies one layer at a time, which needs little memory.
        """
        num_rows = self.num_slots // width
        data = self._cut(num_rows, width)
        for layer, before in zip(data, self._data, strict=True) if kept_rows else ():
            layer[:, :kept_rows, :, :kept_slots] = before[:, :kept_rows, :, :kept_slots].clone()
        self._data, self.num_rows, self.width = data, num_rows, width
        self._range = slice(0)

    def reorder(self, moves: Mapping[int, int], num_slots: int) -> None:
        """Copy the first `num_slots` slots of whole rows to other rows; `moves` maps source rows to destination rows.

        All rows are read before any is written. It copies one layer at a time, which needs little memory.
        """
        if not moves:
            return
        device = self._memory.device
        sources, destinations = torch.tensor([*moves], device=device), torch.tensor([*moves.values()], device=device)
        for layer in self._data:
            layer[:, destinations, :, :num_slots] = layer[:, sources, :, :num_slots]

    def move(self, rows: Sequence[int], begins: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Copy accepted nodes to the first slots of their tree. The tree of each row begins at its slot in `begins`,
        and all paths have equally many nodes. All are read before any is written."""
        device, count = self._memory.device, len(paths[0])
        if len(rows) == 1:
            row, begin = rows[0], begins[0]
            own = self._data[:, :, row]
            path = torch.tensor(paths[0], device=device) + begin
            own[:, :, :, begin : begin + count] = own.index_select(3, path)
            return
        host = [[row, begin, *path] for row, begin, path in zip(rows, begins, paths, strict=True)]
        row, begin, node = torch.tensor(host, device=device).split([1, 1, count], dim=1)
        to = begin + torch.arange(count, device=device)
        self._data[:, :, row, :, to] = self._data[:, :, row, :, begin + node]

    def flat(
        self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int], layers: Sequence[int]
    ) -> Float[Tensor, "1 new layers width"]:
        """Keys and values as a tap (see `KVCache.flat`): per token and layer, heads as [k_h ; v_h].

        Covers `counts` slots of each row, from its slot in `begins` on; one row after the other.
        """
        if len(rows) == 1:
            own = self._data[:, :, rows[0], :, begins[0] : begins[0] + counts[0]]
            if list(layers) != list(range(own.shape[0])):
                own = own[list(layers)]
            return own.permute(3, 0, 2, 1, 4).flatten(2)[None]  # [new, layers, kv_heads, 2, head_dim]
        index = torch.tensor(layers, device=self._memory.device)[:, None]
        row, slot = self._places(rows, begins, counts)
        window = self._data[index, :, row, :, slot]
        return window.transpose(0, 1).transpose(2, 3).flatten(2)[None]  # from [layers, new, 2, kv_heads, head_dim]

    def _places(
        self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int]
    ) -> tuple[Int[Tensor, " new"], Int[Tensor, " new"]]:
        """Rows and slots of `counts` slots of each row, from its slot in `begins` on."""
        each = list(zip(rows, begins, counts, strict=True))
        row = [row for row, _, count in each for _ in range(count)]
        slot = [begin + step for _, begin, count in each for step in range(count)]
        both = torch.tensor([row, slot], device=self._memory.device)
        return both[0], both[1]

    def aim(self, begins: Sequence[int], num_new: int, num_seen: int, first_row: int = 0) -> None:
        """Set where the next pass writes and how many slots it attends to.

        Args:
            begins: first slot written, for each row from `first_row` on.
            num_new: slots written in each row; those past a row's end all share its last slot.
            num_seen: slots that the pass attends to, in every row.
            first_row: first row of the pass.
        """
        rows = slice(first_row, first_row + len(begins))
        if rows != self._range:
            own = self._data[:, :, rows]
            self._range, self._layers = rows, list(zip(own[:, 0].unbind(), own[:, 1].unbind(), strict=True))
        self._seen, self._begin, self._index = num_seen, None, None
        if len(begins) == 1 and begins[0] + num_new <= self.width:
            self._begin = begins[0]
            return
        device = self._memory.device
        slots = torch.tensor(begins, device=device)[:, None] + torch.arange(num_new, device=device)
        self._index = torch.arange(len(begins), device=device)[:, None], slots.clamp_(max=self.width - 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return views of the slots that the pass attends to."""
        key, value = self._layers[layer_idx]
        if self._begin is not None:
            new = key_states.shape[2]
            key.narrow(2, self._begin, new).copy_(key_states)
            value.narrow(2, self._begin, new).copy_(value_states)
        else:
            assert self._index is not None, "aim before a pass"
            rows, slots = self._index
            key[rows, :, slots] = key_states.transpose(1, 2)
            value[rows, :, slots] = value_states.transpose(1, 2)
        return key.narrow(2, 0, self._seen), value.narrow(2, 0, self._seen)

    def places(self, layer_idx: int, num_new: int) -> Places | None:
        """See `targets.kv_cache.KVCache.places`."""
        if type(self).update is not BatchedKVCache.update:
            return None
        key, value = self._layers[layer_idx]
        if self._begin is not None:
            return Places(key, value, self._seen, self._begin)
        assert self._index is not None, "aim before a pass"
        return Places(key, value, self._seen, 0, self._index[1])

    def place(self, positions: Int[Tensor, "rows new"]) -> Int[Tensor, "rows slots"]:
        """The positions of all slots that the pass attends to: `positions` for the new tokens, and the slot's number
        for committed ones."""
        placed = torch.arange(self._seen, device=positions.device).repeat(positions.shape[0], 1)
        if self._begin is not None:
            placed[:, self._begin : self._begin + positions.shape[1]] = positions
            return placed
        assert self._index is not None, "aim before a pass"
        return placed.scatter_(1, self._index[1], positions)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of slots that the next pass attends to."""
        return self._seen
