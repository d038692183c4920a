"""Runs the target over a padded batch and keeps only the columns to be cached."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.activations.format.schema import CacheConfig, hidden_column, kv_column
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target


class KVRecorder(KVCache):
    """Replaces the target's KV cache in one pass over whole chats.

    It keeps the keys and values of the wanted layers as received, without allocating, zeroing or copying memory.
    """

    replayed_methods: ClassVar[frozenset[str]] = frozenset()
    gathered_methods: ClassVar[Mapping[str, int]] = {"take": 1}
    """Both are for split targets: see `targets.parallel.caches.Splittable`."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        spec = target.spec
        super().__init__((), target.num_kv_heads, spec.head_dim, capacity=0, batch=0, like=target.model.lm_head.weight)
        self._wanted = frozenset(layers)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep one layer's keys and values if they are wanted, and return them unchanged."""
        if layer_idx in self._wanted:
            self._kept[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def place(self, positions: Int[Tensor, "batch new"]) -> Int[Tensor, "batch new"]:
        """Return the positions unchanged: the pass attends to exactly the keys that it has just written."""
        return positions

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return and drop the keys and values of one layer, [batch, kv_heads, seq, head_dim] each."""
        return self._kept.pop(layer)


def record_taps(
    target: Target, config: CacheConfig, tokens: Sequence[np.ndarray]
) -> Iterator[tuple[str, Float[Tensor, "tokens width"]]]:
    """Run the target over chats; yield every tap column of their tokens, with chats concatenated and no padding.

    Columns are yielded one at a time, so that a caller that encodes each immediately never holds all of them. Padding
    follows the tokens, where the causal mask hides it: attention needs no other mask and uses its fastest kernel,
    except in layers whose sliding window is shorter than the chats.
    """
    rows, width = len(tokens), max(len(ids) for ids in tokens)
    padded = np.zeros((rows, width), dtype=np.int64)
    for row, ids in enumerate(tokens):
        padded[row, : len(ids)] = ids
    # Compute the tokens' indices on the host: a boolean index would wait for the device once per column.
    row_index, column_index = (
        torch.from_numpy(index).to(target.device)
        for index in np.nonzero(np.arange(width) < np.array([len(ids) for ids in tokens])[:, None])
    )
    layers = range(target.spec.num_layers) if config.kv_layers is None else config.kv_layers
    recorder = target.make_cache(KVRecorder, list(layers))
    positions = torch.arange(width, device=target.device).expand(rows, width)
    depths = tuple(config.hidden_depths)
    output: Any = target.forward(torch.from_numpy(padded).to(target.device), positions, None, recorder, depths)
    for layer in dict.fromkeys(layers):
        key, value = (states.transpose(1, 2)[row_index, column_index] for states in recorder.take(layer))
        yield kv_column(layer), torch.stack([key, value], dim=2).flatten(1)  # tokens, kv heads, [k ; v], head_dim
    for depth in dict.fromkeys(depths):
        yield hidden_column(depth), output.hidden[depth][row_index, column_index]
