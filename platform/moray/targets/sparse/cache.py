"""The key/value cache of a sparse target that reads one sequence: each layer keeps only the tokens that ran through it.

    token       t0  t1  t2  t3
    layer 0      k   k   k   k      has no router
    layer 1      k   k       k      t2 has skipped it
    layer 2      k   k   k          t3 has skipped it

Nothing is stored for a skipped token, and nothing has to be masked: a layer's attention is over its own, shorter run.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from moray.targets.spec import TargetSpec

_BLOCK = 256
"""A layer's memory grows by so many tokens."""


@runtime_checkable
class RoutedCache(Protocol):
    """A cache that lets each layer of a pass see and keep only tokens that run through it."""

    def begin(self) -> None:
        """Begin a pass: drop what the last one wrote without a commit."""
        ...

    def enter(
        self,
        layer: int,
        rows: Int[Tensor, " some"] | None,
        runs: Bool[Tensor, "batch new"],
        mask: Float[Tensor, "#batch 1 new slots"] | None,
    ) -> Tensor | None:
        """Prepare one layer's `update`.

        Args:
            layer: number of the layer.
            rows: which of the new tokens it computes, for a batch of one sequence; None for all of them.
            runs: which of the new tokens run through it.
            mask: of the whole pass, over all slots; None if every new token sees all slots.

        Returns:
            the mask of the computed tokens over the slots that `update` returns; None if they see all of them.
        """
        ...


class SparseCache(Cache):
    """Keys and values of one sequence, layer by layer. Used like `KVCache`."""

    def __init__(self, spec: TargetSpec, capacity: int, like: Tensor) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        """Committed tokens."""
        self.data = like.new_zeros(())
        """Of the dtype and on the device of the keys and values."""
        self._heads, self._head_dim = spec.num_kv_heads, spec.head_dim
        self._stored = [self._empty() for _ in range(spec.num_layers)]
        """[2, 1, kv_heads, room, head_dim] by layer."""
        self._slots: list[Int[Tensor, " stored"]] = []
        """The tokens that each layer has stored, committed ones first, by their place in the sequence."""
        self._new: list[int] = []
        """How many of them, at the end, are not committed."""
        self.reset()

    def _empty(self) -> Tensor:
        return self.data.new_zeros(2, 1, self._heads, 0, self._head_dim)

    def begin(self) -> None:
        """See `RoutedCache.begin`."""
        for layer, new in enumerate(self._new):
            if new:
                self._slots[layer], self._new[layer] = self._slots[layer][:-new], 0

    def enter(
        self,
        layer: int,
        rows: Int[Tensor, " some"] | None,
        runs: Bool[Tensor, "batch new"],
        mask: Float[Tensor, "#batch 1 new slots"] | None,
    ) -> Tensor | None:
        """See `RoutedCache.enter`."""
        count = runs.shape[1] if rows is None else rows.shape[0]
        index = torch.arange(count, device=runs.device) if rows is None else rows
        slots = torch.cat([self._slots[layer], index + self.length])
        self._slots[layer], self._new[layer] = slots, count
        if mask is None:
            return None
        own = mask if rows is None else mask.index_select(2, rows)
        return own.index_select(3, slots)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer after its committed ones; return all of its keys and values."""
        end = self._slots[layer_idx].shape[0]
        begin = end - key_states.shape[2]
        stored = self._stored[layer_idx]
        if end > stored.shape[3]:
            more = -(-(end - stored.shape[3]) // _BLOCK) * _BLOCK
            grown = stored.new_zeros(2, 1, self._heads, stored.shape[3] + more, self._head_dim)
            grown[:, :, :, : stored.shape[3]] = stored
            stored = self._stored[layer_idx] = grown
        stored[0, :, :, begin:end] = key_states
        stored[1, :, :, begin:end] = value_states
        return stored[0, :, :, :end], stored[1, :, :, :end]

    def commit(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of the new tokens."""
        self.cut(self.length + num_tokens)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, committed or new, and commit them. Waits for the device once."""
        if length < self.length:
            self._new = [slots.shape[0] for slots in self._slots]
        for layer, new in enumerate(self._new_slots()):
            kept = self._slots[layer].shape[0] - len(new) + sum(slot < length for slot in new)
            self._slots[layer], self._new[layer] = self._slots[layer][:kept], 0
        self.length = length

    def move(self, path: Sequence[int]) -> None:
        """Give new tokens the places right after the committed ones, in this order; drop all others. Waits for the
        device once.

        Args:
            path: numbers of the new tokens, ascending.
        """
        place_of = {node + self.length: place for place, node in enumerate(path)}
        for layer, new in enumerate(self._new_slots()):
            if not new:
                continue
            first = self._slots[layer].shape[0] - len(new)
            kept = [index for index, slot in enumerate(new) if slot in place_of]
            index = torch.tensor(kept, dtype=torch.long, device=self.data.device) + first
            stored = self._stored[layer]
            stored[:, :, :, first : first + len(kept)] = stored.index_select(3, index)
            places = torch.tensor([place_of[new[each]] + self.length for each in kept], device=self.data.device)
            self._slots[layer] = torch.cat([self._slots[layer][:first], places.long()])
            self._new[layer] = len(kept)

    def _new_slots(self) -> list[list[int]]:
        """By layer, the stored tokens that are not committed."""
        parts = [slots[slots.shape[0] - new :] for slots, new in zip(self._slots, self._new, strict=True)]
        flat, begins = torch.cat(parts).tolist(), [0, *accumulate(self._new)]
        return [flat[begin:end] for begin, end in pairwise(begins)]

    def flat(
        self, start: int, end: int, layers: Sequence[int] | None = None
    ) -> Float[Tensor, "batch new layers width"]:
        """Keys and values of tokens start..end-1 as a tap (see `KVCache.flat`); zeros where a token skipped a layer."""
        numbers = range(len(self._stored)) if layers is None else layers
        kv = self.data.new_zeros(len(numbers), 2, 1, self._heads, end - start, self._head_dim)
        for row, layer in enumerate(numbers):
            slots = self._slots[layer]
            wanted = ((slots >= start) & (slots < end)).nonzero()[:, 0]
            kv[row][..., slots[wanted] - start, :] = self._stored[layer].index_select(3, wanted)
        return kv.permute(2, 4, 0, 3, 1, 5).reshape(1, end - start, len(numbers), 2 * self._heads * self._head_dim)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of committed tokens."""
        return self.length

    @property
    def num_stored(self) -> int:
        """Tokens stored over all layers; for a dense target, layers times tokens."""
        return sum(slots.shape[0] for slots in self._slots)

    def reset(self) -> None:
        """Forget all tokens; the memory stays allocated."""
        self.length = 0
        none = torch.empty(0, dtype=torch.long, device=self.data.device)
        self._slots = [none] * len(self._stored)
        self._new = [0] * len(self._stored)


class WholeSequences(Cache):
    """Stands before a cache that is empty and sees whole sequences at once, as in a pass that records taps: hides the
    tokens that skip a layer from its attention, and stores zeros for them."""

    def __init__(self, cache: Any) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._runs: Tensor | None = None

    def begin(self) -> None:
        """See `RoutedCache.begin`."""

    def enter(
        self,
        layer: int,
        rows: Int[Tensor, " some"] | None,
        runs: Bool[Tensor, "batch new"],
        mask: Float[Tensor, "#batch 1 new slots"] | None,
    ) -> Tensor | None:
        """See `RoutedCache.enter`; computes all tokens."""
        assert rows is None
        self._runs = runs
        return None if mask is None else hide(mask, ~runs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Pass on the new keys and values, zeros for tokens that skip the layer."""
        assert self._runs is not None
        runs = self._runs[:, None, :, None]
        return self._cache.update(key_states * runs, value_states * runs, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No token is committed."""
        return 0


def hide(
    mask: Float[Tensor, "#batch 1 new slots"], hidden_slots: Bool[Tensor, "batch slots"]
) -> Float[Tensor, "batch 1 new slots"]:
    """A mask that hides some slots from every query too. A query that would see nothing sees its first slot: it is one
    that skips the layer, and its result is dropped."""
    hidden = mask.expand(hidden_slots.shape[0], -1, -1, -1).masked_fill(hidden_slots[:, None, None], -torch.inf)
    is_blind = torch.isinf(hidden).all(dim=-1)
    hidden[..., 0].masked_fill_(is_blind, 0.0)
    return hidden
