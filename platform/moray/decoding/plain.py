"""Plain decoding, one token per pass of the target: the reference for every other way to decode.

It uses neither the engine's `TargetRunner` nor its batched cache, so that a fault there cannot hide in the text that it
is compared with.
"""

import time
from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.decoding.generation import Generation
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.sampling.stop import StopChecker, StopStrings, longest_answer
from moray.errors import DataError
from moray.targets.model import Target, TargetOutput
from moray.trees.tree import PrefixMask

CHUNK = 256
"""Tokens of a prompt in one pass."""


class PlainDecoder:
    """The target alone, in its own simple loop."""

    def __init__(self, target: Target, max_model_len: int) -> None:
        """
        Args:
            target: may be shared.
            max_model_len: maximum number of tokens of prompt and answer together; memory for all of them is allocated
                here.

        Raises:
            DataError: this is more than the target's context.
        """
        if max_model_len > target.spec.max_positions:
            raise DataError(
                f"a context of {max_model_len} tokens was asked for; the target's is {target.spec.max_positions}"
            )
        self.target = target
        self._max_model_len = max_model_len
        slots = max_model_len + 1
        self._cache = target.new_cache(slots)
        self._mask = PrefixMask(CHUNK, slots + CHUNK, self._cache.data)
        self._positions = torch.arange(slots, device=target.device)
        self._lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=target.device).tril()

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        *,
        stop: StopStrings | None = None,
        sequence: int = 0,
    ) -> Generation:
        """Decode until an end-of-sequence token, a stop string, `max_new_tokens`, or the end of the context.

        `sequence` numbers the prompt: prompts with different numbers are sampled with different noise.

        Raises:
            DataError: the prompt is empty or leaves no room in the context, or `max_new_tokens` is below 1.
        """
        sampler = Sampler(params, self.target.spec.vocab_size, self.target.device, sequence)
        checker = StopChecker(longest_answer(max_new_tokens, self._max_model_len - len(prompt)), eos_ids, stop)
        begin = time.perf_counter()
        logits = self._prefill(prompt)
        token = sampler.choose(logits, len(prompt))
        generation = Generation(checker.cut([int(token)]))
        prefilled = time.perf_counter()
        while checker.finish_reason is None:
            logits = self._decode(token)
            token = sampler.choose(logits, len(prompt) + len(generation.tokens))
            generation.tokens.extend(checker.cut([int(token)]))
        generation.finish_reason = checker.finish_reason
        generation.prefill_seconds = prefilled - begin
        generation.seconds = time.perf_counter() - prefilled
        return generation

    def _prefill(self, prompt: list[int]) -> Float[Tensor, "1 vocab"]:
        """Forget the sequence before, read a prompt, and return the logits of its first generated token.

        Raises:
            DataError: the prompt is empty or leaves no room in the context.
        """
        if not 0 < len(prompt) < self._max_model_len:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; this context of {self._max_model_len} takes 1 to "
                f"{self._max_model_len - 1}"
            )
        self._cache.reset()
        self._mask.reset()
        tokens = torch.tensor(prompt, device=self.target.device)
        output: TargetOutput | None = None
        for begin in range(0, len(prompt), CHUNK):
            chunk = tokens[begin : begin + CHUNK]
            new = chunk.shape[0]
            mask = None if new == 1 else self._mask.view(self._lower[:new, :new])
            output = self.target.forward(chunk[None], self._positions[None, begin : begin + new], mask, self._cache)
            self._keep(new)
        assert output is not None
        return self.target.logits(output.last[0, -1:])

    def _decode(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Read one token and return the logits of the next; a single token sees all before it, without a mask."""
        position = self._cache.length
        output = self.target.forward(token[None], self._positions[None, position : position + 1], None, self._cache)
        self._keep(1)
        return self.target.logits(output.last[0])

    def _keep(self, num_tokens: int) -> None:
        self._cache.commit(num_tokens)
        self._mask.commit(num_tokens)
