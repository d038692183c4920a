"""Drawing the next tokens of many sequences at once, each exactly as `sampling.Sampler` draws it alone."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.decoding.sampling import STREAM_TOKEN, Sampler, counter_key, gumbel, keyed_uniform

_ROWS_AT_A_TIME = 16
"""Noise is float64 over the whole vocabulary: a row of 128,000 tokens takes some MiB."""


class RowSampler:
    """Draws one token per row: the row's own sequence and position decide its noise."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size

    def key(self, sequence: int) -> int:
        """What stands for a sequence in `choose`."""
        return counter_key(self._params.seed, STREAM_TOKEN, sequence)

    def choose(
        self, logits: Float[Tensor, "rows vocab"], positions: Int[Tensor, " rows"], keys: Int[Tensor, " rows"]
    ) -> Int[Tensor, " rows"]:
        """The tokens at `positions`: the likeliest, or the Gumbel-max samples."""
        if self._params.is_greedy:
            return logits.argmax(dim=-1)
        filters = Sampler(self._params, self._vocab_size, logits.device)
        chosen: list[Tensor] = []
        for begin in range(0, logits.shape[0], _ROWS_AT_A_TIME):
            rows = slice(begin, begin + _ROWS_AT_A_TIME)
            uniform = keyed_uniform(keys[rows, None], positions[rows], self._vocab_size)
            chosen.append((filters.log_probs(logits[rows]) + gumbel(uniform)).argmax(dim=-1))
        return torch.cat(chosen)
