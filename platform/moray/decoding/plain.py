"""Plain decoding, one token per pass of the target: the reference for every other way to decode."""

import time
from collections.abc import Collection

import torch

from moray.batch import TapNeeds
from moray.decoding.params import SamplingParams
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.sampling.stop import StopChecker, StopStrings, longest_answer
from moray.decoding.session import TargetSession
from moray.decoding.stats import Generation
from moray.targets.model import Target


class PlainDecoder:
    """The target alone, in its own simple loop."""

    def __init__(self, target: Target, capacity: int, session: TargetSession | None = None) -> None:
        """
        Args:
            target: may be shared.
            capacity: maximum number of tokens of prompt and answer together.
            session: shared with other decoders that take turns with this one; None for one of its own.
        """
        self.target = target
        self._session = session or TargetSession(target, capacity)

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
        ending = StopChecker(longest_answer(max_new_tokens, self._session.capacity - len(prompt)), eos_ids, stop)
        begin = time.perf_counter()
        self._session.begin(TapNeeds())
        logits = self._session.prefill(prompt)
        token = sampler.choose(logits, len(prompt))
        generation = Generation(ending.cut([int(token)]))
        prefilled = time.perf_counter()
        while ending.finish_reason is None:
            logits = self._session.decode(token)
            token = sampler.choose(logits, len(prompt) + len(generation.tokens))
            generation.tokens.extend(ending.cut([int(token)]))
        generation.finish_reason = ending.finish_reason
        generation.prefill_seconds = prefilled - begin
        generation.seconds = time.perf_counter() - prefilled
        return generation
