"""Turns the taps of cached tokens into a drafter's memory, for several sequences at once."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.decoding.engine.sequence import EngineSequence
from moray.drafters.base import Memory

MAX_TOKENS = 256
"""Tokens of one sequence that are observed at a time: this bounds what `Drafter.observe` holds at once."""


class Observer:
    """One drafter's `observe`, and where its taps come from.

    Keys and values are read from the KV cache; each sequence keeps its own hidden states until they are observed.
    """

    def __init__(self, observe: Callable[[Taps], Memory], needs: TapNeeds, cache: BatchedKVCache) -> None:
        """
        Args:
            observe: see `Drafter.observe`.
            needs: taps that it reads.
            cache: of all sequences.
        """
        self._observe = observe
        self.needs = needs
        self._cache = cache

    def memory_of(
        self, sequences: Mapping[int, EngineSequence], begins: Mapping[int, int], counts: Mapping[int, int]
    ) -> dict[int, Memory]:
        """The memory of the next tokens of some sequences, all observed at once.

        Args:
            sequences: by row of the cache.
            begins: cached tokens of each row that were observed before.
            counts: tokens of each row to observe now, at least 1.

        Returns:
            memory [1, count, width] by row.
        """
        new = [counts[row] for row in sequences]
        kv = None
        if self.needs.kv_layers:
            kv = self._cache.flat([*sequences], [begins[row] for row in sequences], new, self.needs.kv_layers)
        hidden = {depth: _hidden(sequences, counts, depth) for depth in self.needs.hidden_depths}
        memory = self._observe(Taps(kv, hidden))  # a token's memory depends on no other, so sequences need no padding
        if len(sequences) == 1:
            return dict.fromkeys(sequences, memory)
        parts = {name: tensor.split(new, dim=1) for name, tensor in memory.items()}
        return {row: {name: parts[name][index] for name in parts} for index, row in enumerate(sequences)}

    def keys_values_of(self, row: int, begin: int, count: int, layer: int) -> Float[Tensor, "tokens width"]:
        """Keys and values of consecutive cached tokens in one of the target's last layers; 1 is the last one."""
        return self._cache.flat([row], [begin], [count], [self._cache.num_layers - layer])[0, :, 0]


def _hidden(
    sequences: Mapping[int, EngineSequence], counts: Mapping[int, int], depth: int
) -> Float[Tensor, "1 new hidden"]:
    kept = [sequence.take_hidden(depth, counts[row]) for row, sequence in sequences.items()]
    return (kept[0] if len(kept) == 1 else torch.cat(kept))[None]
