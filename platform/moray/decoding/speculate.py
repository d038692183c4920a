"""Generating one answer: plainly, or with a drafter in cycles of observe, propose, verify, accept, commit."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.decoding.accept import Accepted, accept
from moray.decoding.adapt import DraftPlanner
from moray.decoding.costs import Costs, growing_sizes, measure_costs
from moray.decoding.fitting import fit_shape
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import Sampler
from moray.decoding.session import PREFILL_CHUNK, TargetSession, synchronise
from moray.decoding.stats import Generation
from moray.decoding.stop import Ending, StopStrings, longest_answer
from moray.drafters.base import Drafter
from moray.errors import ConfigError
from moray.targets.model import Target
from moray.trees.grow import Budget, root_alone
from moray.trees.shapes import AdaptiveShape, AnyShape, ChainShape, GrowableShape
from moray.trees.tree import TokenTree, chain_of

Accept = Callable[[TokenTree, Float[Tensor, "nodes vocab"], Sampler, int], Accepted]
"""accept(tree, logits, sampler, root_position); see `decoding.accept`."""

OnTokens = Callable[[list[int], int], None]
"""on_tokens(tokens, accepted): newly emitted tokens, of which the first `accepted` were drafted.

A stop string's own tokens are among them: whoever shows text as it comes holds back what may begin one.
"""


class PlainDecoder:
    """The target alone, one token per pass: the baseline that speculation is measured against."""

    def __init__(self, target: Target, capacity: int, session: TargetSession | None = None) -> None:
        """
        Args:
            target: may be shared.
            capacity: most tokens of prompt and answer together.
            session: one to share with other decoders that take turns with this one, in place of one of its own.
        """
        self.target = target
        self._session = session or TargetSession(target, capacity, max_nodes=1)

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
        ending = Ending(longest_answer(max_new_tokens, self._session.capacity - len(prompt)), eos_ids, stop)
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


class SpeculativeDecoder:
    """Target and drafter in one process. By a lossless rule output equals the target's own (see `decoding.accept`)."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        shape: AnyShape,
        capacity: int,
        session: TargetSession | None = None,
        rule: Accept | None = None,
    ) -> None:
        """
        Args:
            target: may be shared.
            drafter: may be shared; each decoder has a drafting state of its own.
            shape: of the trees; an adaptive one measures costs in the first generation, and chooses between the
                drafter's efforts, if it has several, where any other keeps to the first.
            capacity: most tokens of prompt and answer together.
            session: one to share with other decoders that take turns with this one, in place of one of its own.
            rule: which path is accepted, in place of what the sampling parameters ask for.

        Raises:
            ConfigError: the shape does not go with the vocabulary, the drafter or the shared session.
        """
        shape = fit_shape(shape, type(drafter).__name__.lower(), drafter.max_depth, drafter.spec.vocab_size)
        if session is not None and (session.max_nodes <= shape.num_nodes or session.capacity > capacity):
            raise ConfigError(
                f"the shared session is made for {session.capacity} tokens and trees of {session.max_nodes} nodes, "
                f"this decoder for {capacity} tokens and, with its root, {shape.num_nodes + 1} nodes ('{shape.name}')"
            )
        self.target = target
        self.drafter = drafter
        self.shape = shape
        self._accept: Accept = rule or accept
        self._session = session or TargetSession(target, capacity, shape.num_nodes + 1)
        self._state = drafter.new_state(capacity, shape.num_expanded)
        self._unseen: list[Tensor] = []
        """Verified tokens that the drafter has not observed: while nothing is drafted it need not."""
        self._num_kept = 0
        """How many of them, from the first on, the last draft expanded (see `Drafter.extend`)."""
        self._planner: DraftPlanner | None = None

    @torch.inference_mode()
    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        on_tokens: OnTokens | None = None,
        *,
        stop: StopStrings | None = None,
        sequence: int = 0,
    ) -> Generation:
        """Decode until an end-of-sequence token, a stop string, `max_new_tokens`, or the end of the context.

        `sequence` numbers the prompt, as in plain decoding: the same number draws the same noise.

        Raises:
            DataError: the prompt is empty or leaves no room in the context, or `max_new_tokens` is below 1.
        """
        sampler = Sampler(params, self.target.spec.vocab_size, self.target.device, sequence)
        ending = Ending(longest_answer(max_new_tokens, self._session.capacity - len(prompt)), eos_ids, stop)
        begin = time.perf_counter()
        self.drafter.reset(self._state)
        self._unseen, self._num_kept = [], 0
        self._session.begin(self.drafter.observed)
        logits = self._session.prefill(prompt, self._observe)
        root = sampler.choose(logits, len(prompt))
        if isinstance(self.shape, AdaptiveShape) and self._planner is None:
            paused = time.perf_counter()
            self._planner = DraftPlanner(self.shape, self._measure_costs(root, self.shape))
            begin += time.perf_counter() - paused
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
        wait = self._session.wait
        shape = self._next_shape()
        with generation.timed("observe", wait) as observe:
            num_observed = self._catch_up() if shape is not None else 0
        with generation.timed("propose", wait) as propose:
            tree = root_alone(root) if shape is None else self._propose(root, shape, root_position, sampler)
        with generation.timed("verify", wait) as verify:
            logits = self._session.verify(tree)
        with generation.timed("accept", wait) as accept:
            result = self._accept(tree, logits, sampler, root_position)
        emitted = ending.cut([*result.tokens, result.next_token])
        generation.accepted.append(len(result.path))
        generation.emitted.append(len(emitted))
        generation.drafted.append(tree.num_levels)
        generation.efforts.append(self._planner.effort if self._planner else self.drafter.efforts[0])
        generation.tokens.extend(emitted)
        if self._planner is not None:
            self._planner.record(tree.max_depth, len(result.path))
        if on_tokens is not None:
            on_tokens(emitted, min(len(result.path), len(emitted)))
        if ending.finish_reason is not None:
            return root
        with generation.timed("commit", wait) as commit:
            self._session.commit(result.path)
            verified = torch.tensor([*result.tokens, result.next_token], device=root.device)
        if not self._unseen:
            self._num_kept = tree.num_kept(len(result.path))
        self._unseen += [root, verified[:-1]]
        if self._planner is not None and self._session.has_exact_phases:
            draft = propose.seconds if num_observed <= 1 + self.shape.depth else None  # else it was behind a pause
            rest = accept.seconds + commit.seconds
            self._planner.record_seconds(tree.num_nodes - 1, verify.seconds, draft, rest, observe.seconds)
        return verified[-1:]

    def _next_shape(self) -> GrowableShape | None:
        """What to draft in this cycle; None for nothing."""
        if self._planner is not None:
            return self._planner.next_shape()
        assert not isinstance(self.shape, AdaptiveShape), "an adaptive shape has a planner"
        return self.shape

    def _catch_up(self) -> int:
        """Let the drafter observe what was verified since it last did; returns how many tokens that were."""
        if not self._unseen:
            return 0
        tokens = torch.cat(self._unseen)
        self._unseen = []
        for number, part in enumerate(tokens.split(PREFILL_CHUNK)):
            taps = self._session.take_taps(PREFILL_CHUNK)
            self._observe(part, taps, self._num_kept if number == 0 else 0)
        return tokens.shape[0]

    def _propose(
        self, root: Int[Tensor, " 1"], shape: GrowableShape, root_position: int, sampler: Sampler
    ) -> TokenTree:
        if self._planner is None:
            return self._grow(root, shape, root_position, sampler)
        self.drafter.set_effort(self._state, self._planner.effort)
        return self._grow(root, shape, root_position, sampler, self._planner.budget)

    def _grow(
        self,
        root: Int[Tensor, " 1"],
        shape: GrowableShape,
        root_position: int,
        sampler: Sampler,
        budget: Budget | None = None,
    ) -> TokenTree:
        select = sampler.selector(root_position, shape.depth, isinstance(shape, ChainShape))
        return self.drafter.propose(self._state, root, shape, select, budget)

    def _measure_costs(self, root: Int[Tensor, " 1"], shape: AdaptiveShape) -> dict[int, Costs]:
        """Time passes and drafts behind the prompt; nothing of them is kept."""
        sampler = Sampler(SamplingParams(), self.target.spec.vocab_size, self.target.device)
        trees: dict[int, TokenTree] = {}  # made in the run that warms up, for making them is not what is measured

        def verify(num_tokens: int) -> None:
            if num_tokens not in trees:
                chain = chain_of(root.expand(num_tokens))
                # No deeper than a real tree, which must not leave the table of rotations.
                trees[num_tokens] = replace(chain, depths=chain.depths.clamp(max=shape.depth))
            self._session.verify(trees[num_tokens])

        def draft(effort: int, num_levels: int) -> None:
            self.drafter.set_effort(self._state, effort)
            self._grow(root, shape.at(num_levels), 0, sampler)

        def clock() -> float:
            synchronise(self.target.device)
            return time.perf_counter()

        drafts = {effort: partial(draft, effort) for effort in self.drafter.efforts}
        sizes = growing_sizes(shape.num_nodes + 1), growing_sizes(shape.depth)
        return measure_costs(verify, drafts, sizes, clock)

    def _observe(self, tokens: Int[Tensor, " new"], taps: Taps, num_kept: int = 0) -> None:
        self.drafter.extend(self._state, tokens, self.drafter.observe(taps), num_kept)
