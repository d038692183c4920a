"""Many prompts at once for throughput: a sequence that ends makes room for the next prompt at once.

For making data, where nobody waits for a single answer. What an answer is does not depend on its neighbours:
greedy it is the target's own, sampled its noise is a function of seed, sequence and position, exactly as in
`speculate.PlainDecoder`. In low precision, where sums depend on the shapes of a batch, near ties may fall otherwise.
"""

import bisect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.decoding.prompts import PREFILL_TOKENS, is_worth_a_pass, read_together
from moray.decoding.row_cache import GRAIN, RowCache
from moray.decoding.row_sampling import RowSampler
from moray.errors import ConfigError, DataError
from moray.targets.model import Target

FinishReason = Literal["eos", "length"]


class Finished(NamedTuple):
    """An answer, up to and with its end-of-sequence token if it has come to one."""

    number: int
    """What `ContinuousDecoder.submit` gave back."""
    tokens: list[int]
    finish_reason: FinishReason


@dataclass
class _Sequence:
    """One prompt and the answer so far."""

    number: int
    prompt: list[int]
    key: int
    need: int
    tokens: list[int] = field(default_factory=list)


class ContinuousDecoder:
    """Answers whatever is submitted, as many at a time as fit into `batch_tokens` cache slots.

    The running sequences fill the rows 0..num_running-1 of a `RowCache` without a gap: new ones are added behind,
    and the last ones move up into the rows of those that have ended.
    """

    def __init__(
        self,
        target: Target,
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        *,
        batch_tokens: int,
    ) -> None:
        """
        Args:
            target: may be shared.
            params: greedy, or how tokens are drawn.
            max_new_tokens: most tokens of one answer.
            eos_ids: tokens that end an answer.
            batch_tokens: cache slots. A running sequence takes as many as the one with the longest prompt
                needs: prompt and `max_new_tokens`, rounded up to a multiple of 64. Reading prompts takes up
                to 4096 more for the moment, or those of one longer prompt.
        """
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        self._target = target
        self._sampler = RowSampler(params, target.spec.vocab_size)
        self._max_new_tokens = max_new_tokens
        self._eos_ids = frozenset(eos_ids)
        self._cache = RowCache(target, -(-batch_tokens // GRAIN) * GRAIN)
        self._num_submitted = 0
        self._waiting: list[_Sequence] = []  # by length
        self._running: list[_Sequence] = []
        self._tokens: Int[Tensor, " rows"] = torch.zeros(0, dtype=torch.long, device=target.device)
        """The last token of every running sequence, which is not in the cache yet."""
        self._positions = self._tokens
        self._keys = self._tokens

    def submit(self, prompt: list[int], sequence: int = 0) -> int:
        """Put a prompt in line; returns its number. `sequence` names its noise, as in plain decoding.

        Raises:
            DataError: the prompt is empty, or it and its answer do not fit into the context or `batch_tokens`.
        """
        room = min(self._target.spec.max_positions, self._cache.num_slots) - self._max_new_tokens
        if not 0 < len(prompt) <= room:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; with answers of {self._max_new_tokens} a context of "
                f"{self._target.spec.max_positions} and batch_tokens of {self._cache.num_slots} take 1 to {room}"
            )
        need = -(-(len(prompt) + self._max_new_tokens) // GRAIN) * GRAIN
        new = _Sequence(self._num_submitted, prompt, self._sampler.key(sequence), need)
        self._num_submitted += 1
        bisect.insort(self._waiting, new, key=_length)
        return new.number

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """How many sequences are being answered."""
        return len(self._running)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One more token for every running sequence, new ones included; returns the answers that have ended.

        Waits for the device once, to learn the tokens.
        """
        self._admit()
        finished: list[Finished] = []
        ended: set[int] = set()
        for row, (sequence, token) in enumerate(zip(self._running, self._tokens.tolist(), strict=True)):
            sequence.tokens.append(token)
            is_eos = token in self._eos_ids
            if is_eos or len(sequence.tokens) == self._max_new_tokens:
                ended.add(row)
                finished.append(Finished(sequence.number, sequence.tokens, "eos" if is_eos else "length"))
        if ended:
            self._close(ended)
        if self._running:
            self._forward()
        return finished

    def _forward(self) -> None:
        """Put every running sequence's last token into the cache and choose the next one."""
        longest = max(len(sequence.prompt) + len(sequence.tokens) for sequence in self._running)
        num_seen = min(-(-longest // 16) * 16, self._cache.width)  # few different shapes, and aligned ones
        self._cache.aim(self._positions[:, None], num_seen)
        slots = torch.arange(num_seen, device=self._target.device)
        mask = (slots <= self._positions[:, None])[:, None, None]
        output = self._target.forward(self._tokens[:, None], self._positions[:, None], mask, self._cache)
        self._positions = self._positions + 1
        self._tokens = self._choose(output.last[:, 0], self._positions, self._keys)

    def _choose(
        self, hidden: Float[Tensor, "rows hidden"], positions: Int[Tensor, " rows"], keys: Int[Tensor, " rows"]
    ) -> Int[Tensor, " rows"]:
        return self._sampler.choose(self._target.logits(hidden), positions, keys)

    def _close(self, ended: set[int]) -> None:
        """Fill the rows of those that have ended with the last ones that have not."""
        longest = max(len(sequence.prompt) + len(sequence.tokens) for sequence in self._running)
        order = self._cache.close(ended, len(self._running), longest)
        self._running = [self._running[row] for row in order]
        index = torch.tensor(order, dtype=torch.long, device=self._target.device)
        self._tokens, self._positions, self._keys = self._tokens[index], self._positions[index], self._keys[index]

    # --- New sequences ---

    def _admit(self) -> None:
        """Let the longest waiting prompts that fit begin, if they are enough to be worth a pass."""
        chosen = self._fitting()
        if not is_worth_a_pass(len(chosen), len(self._running), len(self._waiting)):
            return
        numbers = {sequence.number for sequence in chosen}
        self._waiting = [sequence for sequence in self._waiting if sequence.number not in numbers]
        width = max(sequence.need for sequence in (*self._running, *chosen))
        if width > self._cache.width or len(self._running) + len(chosen) > self._cache.num_rows:
            held = max((len(sequence.prompt) + len(sequence.tokens) for sequence in self._running), default=0)
            self._cache.arrange(width, len(self._running), held)
        while chosen:
            length = len(chosen[0].prompt)
            count = max(1, PREFILL_TOKENS // length)
            self._prefill(chosen[:count])
            chosen = chosen[count:]

    def _fitting(self) -> list[_Sequence]:
        """Who of those in line may begin, longest first.

        With n running, one more fits if n + 1 rows as wide as the widest do: so neither the running ones nor it
        may need more than a share of 1 / (n + 1).
        """
        chosen: list[_Sequence] = []
        widest = max((sequence.need for sequence in self._running), default=0)
        end = len(self._waiting)
        while end:
            share = self._cache.num_slots // (len(self._running) + len(chosen) + 1)
            end = bisect.bisect_right(self._waiting, share, hi=end, key=_need)
            if widest > share or not end:
                break
            end -= 1
            chosen.append(self._waiting[end])
            widest = max(widest, chosen[-1].need)
        return chosen

    def _prefill(self, new: list[_Sequence]) -> None:
        """Read prompts into the rows behind the running ones, and choose their first tokens.

        Nothing looks at a prompt's padding, since slots are looked at only once they have been written anew.
        """
        cache, last, lengths = read_together(self._target, [sequence.prompt for sequence in new])
        self._cache.fill(len(self._running), cache)
        keys = torch.tensor([sequence.key for sequence in new], dtype=torch.long, device=self._target.device)
        tokens = self._choose(last, lengths, keys)
        self._running += new
        self._tokens = torch.cat([self._tokens, tokens])
        self._positions = torch.cat([self._positions, lengths])
        self._keys = torch.cat([self._keys, keys])


def _length(sequence: _Sequence) -> int:
    return len(sequence.prompt)


def _need(sequence: _Sequence) -> int:
    return sequence.need
