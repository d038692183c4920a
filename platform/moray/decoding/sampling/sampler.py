"""Draws tokens: filters on the target's distribution, and random numbers that depend on position alone.

Every random number is a hash of (seed, sequence, position, stream, index): it does not depend on the batch, the tree,
the replica, or on what was drawn before. Draft and test use different streams.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.trees.grow import Select

STREAM_TOKEN, STREAM_DRAFT, STREAM_TEST, STREAM_RESIDUAL = range(4)

_MASK = (1 << 64) - 1


def counter_uniform(
    seed: int, stream: int, positions: Int[Tensor, " rows"], size: int, sequence: int = 0
) -> Float[Tensor, "rows size"]:
    """Uniform numbers in (0, 1), float64, addressed by position (row) and index (column).

    SplitMix64's finaliser (Steele, Lea, Flood 2014) over a 64-bit counter, in wrapping int64 arithmetic,
    which is the same on every device.
    """
    return keyed_uniform(counter_key(seed, stream, sequence), positions, size)


def counter_key(seed: int, stream: int, sequence: int = 0) -> int:
    """Combine seed, stream and sequence into a key for `keyed_uniform`; it fits into an int64."""
    return _signed(_mix(_mix(_mix(seed & _MASK) + sequence) + stream))


def keyed_uniform(
    keys: int | Int[Tensor, "rows 1"], positions: Int[Tensor, " rows"], size: int
) -> Float[Tensor, "rows size"]:
    """The numbers of `counter_uniform`, with one key for all rows or one key per row."""
    row = _mix_tensor(positions[:, None] * _signed(0x9E3779B97F4A7C15) + keys)
    column = torch.arange(1, size + 1, device=positions.device) * _signed(0xD1342543DE82EF95)
    bits = _mix_tensor(row + column)
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52  # with one bit more, the largest would round to 1


def gumbel(uniform: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Standard Gumbel noise from uniform numbers."""
    return -torch.log(-torch.log(uniform))


def highest(scores: Float[Tensor, "*any vocab"]) -> Int[Tensor, "*any"]:
    """The token with the highest score, the first one on a tie.

    `argmax` gives the same. On a CPU, `max` takes a quarter to a half of its time for 49,152 tokens
    (docs/results/decoding.md); on a GPU that was not measured.
    """
    return scores.max(dim=-1).indices


class Sampler:
    """Draws one sequence's tokens from logits according to `SamplingParams`."""

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device, sequence: int = 0) -> None:
        self.params = params
        self._vocab_size = vocab_size
        self._device = device
        self.sequence = sequence

    def log_probs(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """Log-probabilities after temperature, top-k, min-p and top-p; filtered tokens at -inf."""
        scores = logits.float()
        params = self.params
        if params.is_greedy:
            return F.log_softmax(scores, dim=-1)
        scores = scores / params.temperature
        if 0 < params.top_k < self._vocab_size:
            least = scores.topk(params.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if params.min_p > 0:
            least = scores.max(dim=-1, keepdim=True).values + math.log(params.min_p)
            scores = scores.masked_fill(scores < least, -math.inf)
        if params.top_p < 1:
            ordered, index = scores.sort(dim=-1, descending=True)
            probs = ordered.softmax(dim=-1)
            # A token stays if the mass before it is below top_p, so the first always stays.
            dropped = torch.zeros_like(scores, dtype=torch.bool)
            dropped.scatter_(1, index, probs.cumsum(dim=-1) - probs >= params.top_p)
            scores = scores.masked_fill(dropped, -math.inf)
        return F.log_softmax(scores, dim=-1)

    def noise(self, first_position: int, count: int) -> Float[Tensor, "count vocab"]:
        """Gumbel noise of `count` consecutive positions: it makes a sample a function of its position."""
        positions = torch.arange(first_position, first_position + count, device=self._device)
        uniform = counter_uniform(self.params.seed, STREAM_TOKEN, positions, self._vocab_size, self.sequence)
        return gumbel(uniform)

    def uniform(self, stream: int, position: int, size: int) -> Float[Tensor, " size"]:
        """Uniform numbers for one position."""
        positions = torch.tensor([position], device=self._device)
        return counter_uniform(self.params.seed, stream, positions, size, self.sequence)[0]

    def choose(self, logits: Float[Tensor, "1 vocab"], position: int) -> Int[Tensor, " 1"]:
        """The token at `position`: the likeliest, or the Gumbel-max sample."""
        if self.params.is_greedy:
            return highest(logits)
        return highest(self.log_probs(logits) + self.noise(position, 1))

    def selector(self, root_position: int, depth: int, is_chain: bool) -> Select:
        """How a tree below the token at `root_position` picks its children (see `trees.grow.Select`).

        Greedy, typical and coupled: the k best by (perturbed) log-probability. Rejection on a chain: one token sampled
        from the drafter's own filtered distribution, which is returned for the test.
        """
        coupled = not self.params.is_greedy and self.params.acceptance_method == "gumbel_coupled"
        noise = self.noise(root_position + 1, depth) if coupled else None
        return partial(self._select, root_position, is_chain, noise)

    def _select(
        self,
        root_position: int,
        is_chain: bool,
        noise: Float[Tensor, "depth vocab"] | None,
        logits: Float[Tensor, "new vocab"],
        level: int,
        children: int,
    ) -> tuple[Int[Tensor, "new children"], Float[Tensor, "new children"], Float[Tensor, "new vocab"] | None]:
        params = self.params
        if children == 1 and is_chain and (params.is_greedy or params.acceptance_method == "typical"):
            best = highest(logits)[..., None]
            return best, best.float(), None  # a chain never reads the scores
        log_q = self.log_probs(logits)
        if noise is not None:
            perturbed = F.log_softmax(log_q + noise[level].float(), dim=-1)
            scores, tokens = perturbed.topk(children, dim=-1)
            return tokens, scores, None
        if is_chain and params.acceptance_method == "rejection":
            uniform = self.uniform(STREAM_DRAFT, root_position + 1 + level, self._vocab_size)
            tokens = highest(log_q + gumbel(uniform))[..., None]
            return tokens, log_q.gather(1, tokens), log_q.exp()
        scores, tokens = log_q.topk(children, dim=-1)
        return tokens, scores, None


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own shift keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
