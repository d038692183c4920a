"""Generating one answer: plainly, or with a drafter in cycles of propose, verify, accept, commit, observe."""

import time
from collections.abc import Callable, Collection

import torch
from jaxtyping import Int
from torch import Tensor

from moray.batch import Taps
from moray.decoding.accept import accept
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import Sampler
from moray.decoding.session import TargetSession
from moray.decoding.stats import Generation
from moray.decoding.stop import Ending, StopStrings
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape

OnTokens = Callable[[list[int], int], None]
"""on_tokens(tokens, accepted): newly emitted tokens, of which the first `accepted` were drafted.

A stop string's own tokens are among them: whoever shows text as it comes holds back what may begin one.
"""


class PlainDecoder:
    """The target alone, one token per pass: the baseline that speculation is measured against."""

    def __init__(self, target: Target, capacity: int) -> None:
        self.target = target
        self._session = TargetSession(target, capacity, max_nodes=1)

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        *,
        sequence: int = 0,
        stop: StopStrings | None = None,
    ) -> Generation:
        """Decode until an end-of-sequence token, a stop string, `max_new_tokens`, or the end of the context.

        `sequence` numbers the prompt: prompts with different numbers are sampled with different noise.

        Raises:
            DataError: the prompt is empty or leaves no room in the context, or `max_new_tokens` is below 1.
        """
        sampler = Sampler(params, self.target.spec.vocab_size, self.target.device, sequence)
        ending = Ending(_limit(max_new_tokens, self._session.capacity - len(prompt)), eos_ids, stop)
        begin = time.perf_counter()
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


class SpeculativeDecoder:
    """Target and drafter in one process. By a lossless rule output equals the target's own (see `decoding.accept`)."""

    def __init__(
        self, target: Target, drafter: Drafter, shape: ChainShape | FixedShape | DynamicShape, capacity: int
    ) -> None:
        if shape.max_children > target.spec.vocab_size:
            raise ConfigError(
                f"tree '{shape.name}' gives a node {shape.max_children} children; the target's vocabulary has "
                f"{target.spec.vocab_size} tokens"
            )
        if drafter.max_depth is not None and shape.depth > drafter.max_depth:
            raise ConfigError(
                f"tree '{shape.name}' is {shape.depth} levels deep; this drafter drafts at most {drafter.max_depth}"
            )
        self.target = target
        self.drafter = drafter
        self.shape = shape
        self._session = TargetSession(target, capacity, shape.num_nodes + 1, drafter.observed)
        self._state = drafter.new_state(capacity, shape.num_expanded)

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        on_tokens: OnTokens | None = None,
        *,
        sequence: int = 0,
        stop: StopStrings | None = None,
    ) -> Generation:
        """Decode until an end-of-sequence token, a stop string, `max_new_tokens`, or the end of the context.

        `sequence` numbers the prompt, as in plain decoding: the same number draws the same noise.

        Raises:
            DataError: the prompt is empty or leaves no room in the context, or `max_new_tokens` is below 1.
        """
        sampler = Sampler(params, self.target.spec.vocab_size, self.target.device, sequence)
        ending = Ending(_limit(max_new_tokens, self._session.capacity - len(prompt)), eos_ids, stop)
        begin = time.perf_counter()
        self.drafter.reset(self._state)
        logits = self._session.prefill(prompt, self._observe)
        root = sampler.choose(logits, len(prompt))
        generation = Generation(ending.cut([int(root)]))
        if on_tokens is not None:
            on_tokens(generation.tokens[:], 0)
        prefilled = time.perf_counter()
        while ending.finish_reason is None:
            root = self._cycle(root, len(prompt), sampler, generation, ending, on_tokens)
        generation.finish_reason = ending.finish_reason
        generation.prefill_seconds = prefilled - begin
        generation.seconds = time.perf_counter() - prefilled
        return generation

    def _cycle(
        self,
        root: Int[Tensor, " 1"],
        prompt_length: int,
        sampler: Sampler,
        generation: Generation,
        ending: Ending,
        on_tokens: OnTokens | None,
    ) -> Int[Tensor, " 1"]:
        """One cycle; returns the next root."""
        root_position = prompt_length + len(generation.tokens) - 1
        is_chain = isinstance(self.shape, ChainShape)
        with generation.timed("propose"):
            select = sampler.selector(root_position, self.shape.depth, is_chain)
            tree = self.drafter.propose(self._state, root, self.shape, select)
        with generation.timed("verify"):
            logits = self._session.verify(tree)
        with generation.timed("accept"):
            result = accept(tree, logits, sampler, root_position)
        emitted = ending.cut([*result.tokens, result.next_token])
        generation.accepted.append(len(result.path))
        generation.emitted.append(len(emitted))
        generation.drafted.append(tree.max_depth)
        generation.tokens.extend(emitted)
        if on_tokens is not None:
            on_tokens(emitted, min(len(result.path), len(emitted)))
        with generation.timed("commit"):
            taps = self._session.commit(result.path)
            verified = tree.tokens[[0, *result.path]]
        with generation.timed("observe"):
            self._observe(verified, taps)
        return torch.tensor([result.next_token], device=root.device)

    def _observe(self, tokens: Int[Tensor, " new"], taps: Taps) -> None:
        self.drafter.extend(self._state, tokens, self.drafter.observe(taps))


def _limit(max_new_tokens: int, room: int) -> int:
    """Most tokens to generate. That no room is left is for the prefill to report."""
    if max_new_tokens < 1:
        raise DataError(f"max_new_tokens is {max_new_tokens}; at least 1 is generated")
    return min(max_new_tokens, room)
