"""The engine's caches for a sparse target: one for a single sequence, one for several.

For a single sequence, each layer stores only the tokens that ran through it, so nothing is read or masked for the
others (see `targets.sparse.cache`). With several sequences, a skipped token has a slot in every layer,
like all others; in the layers that it skipped, no query sees the slot. So rows of different lengths stay simple, but
skipping frees no memory.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.targets.model import Target
from moray.targets.sparse.cache import SparseCache, hide


class SparseSingleKVCache(BatchedKVCache):
    """A `BatchedKVCache` of one row, and a `RoutedCache`; its memory grows with the tokens that each layer stores."""

    def __init__(self, target: Target, num_slots: int) -> None:
        super().__init__(target, 0)
        self.num_slots = num_slots
        self._own = SparseCache(target.spec, num_slots, target.model.lm_head.weight)

    @property
    def num_stored(self) -> int:
        """Tokens stored, over all layers."""
        return self._own.num_stored

    def arrange(self, width: int, kept_rows: int, kept_slots: int) -> None:
        """There is one row, which may be filled up to `width` slots."""
        self.num_rows, self.width = 1, width
        if not kept_rows:
            self._own.reset()

    def reorder(self, moves: Mapping[int, int], num_slots: int) -> None:
        """The row stays where it is."""

    def move(self, rows: Sequence[int], begins: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """See `BatchedKVCache.move`; the other nodes of the tree are dropped."""
        (path,) = paths
        assert [self._own.length] == list(begins), "the tree of the last pass"
        self._own.move(path)

    def flat(
        self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int], layers: Sequence[int]
    ) -> Float[Tensor, "1 new layers width"]:
        """See `BatchedKVCache.flat`; zeros where a token skipped a layer."""
        (begin,), (count,) = begins, counts
        return self._own.flat(begin, begin + count, layers)

    def aim(self, begins: Sequence[int], num_new: int, num_seen: int, first_row: int = 0) -> None:
        """See `BatchedKVCache.aim`. What the row holds from its slot in `begins` on is dropped."""
        (begin,) = begins
        assert first_row == 0, "there is one row"
        self._own.cut(begin)
        self._begin, self._seen = begin, num_seen

    def begin(self) -> None:
        """See `targets.sparse.cache.RoutedCache.begin`; done by `aim`."""

    def enter(
        self,
        layer: int,
        rows: Int[Tensor, " some"] | None,
        runs: Bool[Tensor, "batch new"],
        mask: Float[Tensor, "#batch 1 new slots"] | None,
    ) -> Tensor | None:
        """See `targets.sparse.cache.RoutedCache.enter`."""
        return self._own.enter(layer, rows, runs, mask)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `SparseCache.update`."""
        return self._own.update(key_states, value_states, layer_idx)


class SparseBatchedKVCache(BatchedKVCache):
    """A `RoutedCache` for several sequences; see the module's docstring."""

    def __init__(self, target: Target, num_slots: int) -> None:
        super().__init__(target, num_slots)
        self._all_valid = torch.zeros(self.num_layers, num_slots, dtype=torch.bool, device=target.device)
        self._valid = self._all_valid[:, :0].unflatten(1, (0, 0))
        """[layers, rows, slots]: whether a layer has keys and values in a slot."""
        self._computed: Int[Tensor, " some"] | None = None
        """Which of the new tokens the next `update` stores; None for all."""
        self._masks: tuple[Float[Tensor, "1 1 1 slots"], ...] = ()
        """For a pass over one row, by layer: 0 for its slots with keys and values, -inf for the others. New slots are
        filled in as tokens run through the layer."""

    def arrange(self, width: int, kept_rows: int, kept_slots: int) -> None:
        before = self._valid[:, :kept_rows, :kept_slots].clone()
        super().arrange(width, kept_rows, kept_slots)
        num_rows = self.num_rows
        self._valid = self._all_valid[:, : num_rows * width].unflatten(1, (num_rows, width))
        if kept_rows:
            self._valid[:, :kept_rows, :kept_slots] = before

    def reorder(self, moves: Mapping[int, int], num_slots: int) -> None:
        super().reorder(moves, num_slots)
        if moves:
            self._valid[:, [*moves.values()], :num_slots] = self._valid[:, [*moves], :num_slots]

    def move(self, rows: Sequence[int], begins: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        super().move(rows, begins, paths)
        for row, begin, path in zip(rows, begins, paths, strict=True):
            nodes = torch.tensor(path, device=self._valid.device) + begin
            self._valid[:, row, begin : begin + len(path)] = self._valid[:, row].index_select(1, nodes)

    def flat(
        self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int], layers: Sequence[int]
    ) -> Float[Tensor, "1 new layers width"]:
        """See `BatchedKVCache.flat`; zeros where a token skipped a layer."""
        kv = super().flat(rows, begins, counts, layers)
        row, slot = self._places(rows, begins, counts)
        valid = self._valid[torch.tensor(layers, device=self._valid.device)[:, None], row, slot]
        return kv * valid.T[None, :, :, None]

    def aim(self, begins: Sequence[int], num_new: int, num_seen: int, first_row: int = 0) -> None:
        """See `BatchedKVCache.aim`. The new tokens have skipped every layer until they run through it."""
        super().aim(begins, num_new, num_seen, first_row)
        valid = self._valid[:, self._range]
        if self._begin is not None:
            valid[:, :, self._begin : self._begin + num_new] = False
            masks = self._memory.new_zeros(self.num_layers, 1, 1, 1, num_seen)
            self._masks = masks.masked_fill_(~valid[:, 0, None, None, None, :num_seen], -torch.inf).unbind()
        else:
            assert self._index is not None
            valid.scatter_(2, self._index[1].expand(self.num_layers, -1, -1), value=False)

    def begin(self) -> None:
        """See `targets.sparse.cache.RoutedCache.begin`; done by `aim`."""

    def enter(
        self,
        layer: int,
        rows: Int[Tensor, " some"] | None,
        runs: Bool[Tensor, "batch new"],
        mask: Float[Tensor, "#batch 1 new slots"] | None,
    ) -> Tensor | None:
        """See `targets.sparse.cache.RoutedCache.enter`."""
        valid = self._valid[layer, self._range]
        self._computed = rows
        if self._begin is not None:
            new = slice(self._begin, self._begin + runs.shape[1])
            valid[:, new] = runs
            own = self._masks[layer]
            own[..., new].masked_fill_(runs, 0.0)
            if mask is None:
                return own
            return (mask if rows is None else mask.index_select(2, rows)) + own  # no query is blind: all of them run
        assert self._index is not None, "aim before a pass"
        valid.scatter_(1, self._index[1], runs)
        seen = valid[:, : self._seen]
        if mask is None:  # one new token, which sees all slots
            mask = self._memory.new_zeros(1, 1, 1, self._seen)
        return hide(mask if rows is None else mask.index_select(2, rows), ~seen)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `BatchedKVCache.update`; stores the computed tokens only."""
        if self._computed is None:
            return super().update(key_states, value_states, layer_idx)
        key, value = self._layers[layer_idx]
        if self._begin is not None:
            slots = self._computed + self._begin
        else:
            assert self._index is not None, "aim before a pass"
            slots = self._index[1][0].index_select(0, self._computed)
        key.index_copy_(2, slots, key_states)
        value.index_copy_(2, slots, value_states)
        return key.narrow(2, 0, self._seen), value.narrow(2, 0, self._seen)
