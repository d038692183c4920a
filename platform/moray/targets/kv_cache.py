"""The key/value cache of a model that reads one sequence, or several of the same length: preallocated, addressed by
slot.

It replaces a `transformers` cache, so that the model itself stays unmodified. It knows slots, not positions: new tokens
go to consecutive slots, whatever their positions are. The engine's cache, in which every row has its own length, is
`decoding.engine.kv_cache`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache


class Places(NamedTuple):
    """Where a layer's new keys and values go, for kernels that write them themselves."""

    key: Float[Tensor, "batch kv_heads capacity head_dim"]
    value: Float[Tensor, "batch kv_heads capacity head_dim"]
    num_seen: int
    """Slots, from the first one on, that the pass attends to."""
    begin: int
    """First slot that the new tokens of every row are written to, one after the other."""
    slots: Int[Tensor, "batch new"] | None = None
    """The slots of the new tokens instead, if rows differ."""


class KVCache(Cache):
    """Keys (after rotary) and values of every layer in one tensor.

    `data` is [layers, 2, batch, kv_heads, capacity, head_dim]. Slots 0..length-1 hold committed tokens. A forward pass
    of q tokens writes slots length..length+q-1, and `commit` decides how many of them are kept. Nothing is allocated
    after construction.
    """

    replayed_methods: ClassVar[frozenset[str]] = frozenset({"commit", "reset"})
    gathered_methods: ClassVar[Mapping[str, int]] = {"flat": -1}
    """Both for split targets: see `targets.parallel.caches.Splittable`."""

    def __init__(
        self, layers: Sequence[int], num_kv_heads: int, head_dim: int, capacity: int, batch: int, like: Tensor
    ) -> None:
        super().__init__(layers=[])
        shape = (len(layers), 2, batch, num_kv_heads, capacity, head_dim)
        self.data = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.length = 0
        self.capacity = capacity
        # Positions of the tokens in the slots: the slot's number for committed tokens, any later one for tree nodes.
        self._positions = torch.arange(capacity, device=like.device).repeat(batch, 1)
        self._has_places = False
        # Keys and values by absolute layer number, so that the last N layers can have a smaller cache of their own.
        self._layers = {layer: (self.data[row, 0], self.data[row, 1]) for row, layer in enumerate(layers)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values after the committed ones; return views of both together."""
        new = key_states.shape[2]
        key, value = self._layers[layer_idx]
        key.narrow(2, self.length, new).copy_(key_states)
        value.narrow(2, self.length, new).copy_(value_states)
        return key.narrow(2, 0, self.length + new), value.narrow(2, 0, self.length + new)

    def places(self, layer_idx: int, num_new: int) -> Places | None:
        """What `update` would write to and return; None from caches that store keys and values in another way."""
        if type(self).update is not KVCache.update:
            return None
        return Places(*self._layers[layer_idx], self.length + num_new, self.length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of committed tokens."""
        return self.length

    def place(self, positions: Int[Tensor, "batch new"]) -> Int[Tensor, "batch slots"]:
        """Store the positions of the tokens that the next pass writes; return those of all slots that it sees."""
        self._has_places = True
        end = self.length + positions.shape[1]
        self._positions[:, self.length : end] = positions
        return self._positions[:, :end]

    def commit(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of the slots just written."""
        self.length += num_tokens

    def write(self, kv: Float[Tensor, "batch new layers width"], first_layer: int = 0) -> None:
        """Append committed tokens whose keys and values came from elsewhere (see `flat`), in these rows of the cache's
        layers only."""
        batch, new, layers, _ = kv.shape
        heads, head_dim = self.data.shape[3], self.data.shape[5]
        unpacked = kv.reshape(batch, new, layers, heads, 2, head_dim).permute(2, 4, 0, 3, 1, 5)
        self.data[first_layer : first_layer + layers, ..., self.length : self.length + new, :] = unpacked
        self._place_in_order(new)
        self.length += new

    def flat(
        self, start: int, end: int, layers: Sequence[int] | None = None
    ) -> Float[Tensor, "batch new layers width"]:
        """Keys and values of slots start..end-1 as a tap: per token and layer, heads as [k_h ; v_h].

        `layers` picks rows of the cache; None takes all. Copies only these slots of these layers; evenly spaced layers
        need no further copy.
        """
        window = self.data[..., start:end, :]
        if layers is not None and len(layers) < window.shape[0]:
            step = layers[1] - layers[0] if len(layers) > 1 else 1
            is_even = step > 0 and list(layers) == list(range(layers[0], layers[-1] + 1, step))
            window = window[layers[0] : layers[-1] + 1 : step] if is_even else window[list(layers)]
        num_layers, _, batch, heads, new, head_dim = window.shape
        return window.permute(2, 4, 0, 3, 1, 5).reshape(batch, new, num_layers, 2 * heads * head_dim)

    def reset(self) -> None:
        """Forget all tokens; the memory stays allocated."""
        self.length = 0

    def _place_in_order(self, num_tokens: int) -> None:
        if self._has_places:
            end = self.length + num_tokens
            self._positions[:, self.length : end] = torch.arange(self.length, end, device=self._positions.device)


class KVCaches:
    """Several sequences' caches as one batch: new keys and values are written to each sequence's own cache, and all
    contents are copied side by side, shorter ones padded with zeros that no query may see."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = caches

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Like `KVCache.update`; returns keys and values, each [sequences, kv_heads, most slots, head_dim]."""
        _, heads, new, head_dim = key_states.shape
        most = max(cache.length for cache in self._caches) + new
        both = key_states.new_zeros(2, len(self._caches), heads, most, head_dim)
        for row, cache in enumerate(self._caches):
            own = slice(row, row + 1)
            key, value = cache.update(key_states[own], value_states[own], layer_idx)
            both[0, own, :, : key.shape[2]] = key
            both[1, own, :, : key.shape[2]] = value
        return both[0], both[1]

    def place(self, positions: Int[Tensor, "sequences new"]) -> Int[Tensor, "sequences most"]:
        """Like `KVCache.place`; shorter rows are padded with zeros."""
        own = [cache.place(row[None])[0] for cache, row in zip(self._caches, positions, strict=True)]
        return pad_sequence(own, batch_first=True)

    def mask(
        self, masks: Sequence[Float[Tensor, "1 1 new _"] | None], new: Float[Tensor, "sequences new hidden"]
    ) -> Float[Tensor, "sequences 1 new most"]:
        """Combine the masks of the sequences (None: everything) into one, in dtype and device of `new`."""
        lengths = [cache.length + new.shape[1] for cache in self._caches]
        joined = new.new_full((len(masks), 1, new.shape[1], max(lengths)), -torch.inf)
        for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
            joined[row, :, :, :length] = 0.0 if mask is None else mask[0]
        return joined


class PastAndPredicted:
    """Keys and values that a layer sees while Target Layer Inference is trained on all positions at once.

    For every layer: the target's own (cached) keys and values of all positions, followed by those that the layer
    computes from predicted features. For each query, the mask then picks real ones up to the last verified position and
    predicted ones after it.
    """

    def __init__(self, kv: Float[Tensor, "batch seq layers width"], first_layer: int, head_dim: int) -> None:
        batch, seq, layers, width = kv.shape
        unpacked = kv.view(batch, seq, layers, width // (2 * head_dim), 2, head_dim)
        self._past = unpacked.permute(2, 4, 0, 3, 1, 5)
        self._first_layer = first_layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return [past ; predicted] keys and values, each [batch, kv_heads, 2 * seq, head_dim]."""
        past_key, past_value = self._past[layer_idx - self._first_layer]
        key = torch.cat([past_key.to(key_states.dtype), key_states], dim=2)
        value = torch.cat([past_value.to(value_states.dtype), value_states], dim=2)
        return key, value
