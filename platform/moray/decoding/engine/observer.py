"""Turns the taps of cached tokens into a drafter's memory, for several sequences at once."""

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        """The memory of the next tokens of some sequences, all in one batch, padded to the same length.

        Args:
            sequences: by row of the cache.
            begins: cached tokens of each row that were observed before.
            counts: tokens of each row to observe now, at least 1.

        Returns:
            memory [1, count, width] by row.
        """
        kv = None
        if self.needs.kv_layers:  # the padding after a shorter sequence is never read
            firsts = [begins[row] for row in sequences]
            kv = self._cache.flat([*sequences], firsts, max(counts.values()), self.needs.kv_layers)
        hidden = {depth: _hidden(sequences, counts, depth) for depth in self.needs.hidden_depths}
        memory = self._observe(Taps(kv, hidden))
        if len(sequences) == 1:
            return dict.fromkeys(sequences, memory)
        return {
            row: {name: tensor[index : index + 1, : counts[row]] for name, tensor in memory.items()}
            for index, row in enumerate(sequences)
        }

    def keys_values_of(self, row: int, begin: int, count: int, layer: int) -> Float[Tensor, "tokens width"]:
        """Keys and values of consecutive cached tokens in one of the target's last layers; 1 is the last one."""
        return self._cache.flat([row], [begin], count, [self._cache.num_layers - layer])[0, :, 0]


def _hidden(
    sequences: Mapping[int, EngineSequence], counts: Mapping[int, int], depth: int
) -> Float[Tensor, "rows most hidden"]:
    kept = [sequence.take_hidden(depth, counts[row]) for row, sequence in sequences.items()]
    return kept[0][None] if len(kept) == 1 else pad_sequence(kept, batch_first=True)
