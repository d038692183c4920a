"""Generates one answer at a time: a facade over an engine with one row, the same loop that also serves."""

import time
from collections.abc import Callable, Collection

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import DraftSource, LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.node_selection import NodeSelector
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.engine.stats import CYCLE_PHASES
from moray.decoding.generation import Generation
from moray.decoding.params import SamplingParams
from moray.decoding.request import Request
from moray.decoding.sampling.accept import Accept, row_by_row
from moray.decoding.sampling.stop import StopChecker, StopStrings, longest_answer
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.trees.shapes import AnyShape, ChainShape

_PREFILL_TOKENS = 256
_NO_DRAFT = ChainShape(type="chain", depth=1)

OnTokens = Callable[[list[int], int], None]
"""on_tokens(tokens, accepted): newly emitted tokens, of which the first `accepted` were drafted.

They include the tokens of a stop string: code that shows text as it comes must hold back what may begin one.
"""


def runner_for(target: Target, max_model_len: int, max_nodes: int) -> TargetRunner:
    """A KV cache and passes for one sequence, which decoders that take turns can share.

    Args:
        target: may be shared.
        max_model_len: maximum number of tokens of prompt and answer together.
        max_nodes: maximum number of nodes of a tree below its root.
    """
    return TargetRunner(target, max_model_len + max_nodes + 1, max_rows=1)


class SpeculativeDecoder:
    """Target and drafter in one process. With a lossless acceptance method, output equals the target's own (see
    `sampling.accept`)."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        shape: AnyShape = _NO_DRAFT,
        max_model_len: int | None = None,
        runner: TargetRunner | None = None,
        accept: Accept | None = None,
        *,
        drafts: DraftSource | None = None,
        selector: NodeSelector | None = None,
        is_timed: bool = False,
    ) -> None:
        """
        Args:
            target: may be shared.
            drafter: may be shared; each decoder has its own drafting state. None decodes with the target alone, one
                token per pass.
            shape: shape of the trees. An adaptive one measures costs before the first generation, and chooses between
                the drafter's N if it has several; any other shape uses the first N.
            max_model_len: maximum number of tokens of prompt and answer together; None for the target's context.
            runner: shared with other decoders that take turns with this one; None for one of its own.
            accept: acceptance method that overrides the one in the sampling parameters.
            drafts: where the drafter's drafts come from; None for drafts in this process.
            selector: of the nodes of a draft that a sparse target's later layers verify; None for all of them.
            is_timed: wait for the device after each phase, so that phases can be timed separately; costs some overlap.

        Raises:
            ConfigError: the shape does not fit the vocabulary, the drafter or the shared runner, or drafts come
                without a drafter.
            DataError: `max_model_len` exceeds the target's context.
        """
        context = target.spec.max_positions
        self.max_model_len = context if max_model_len is None else max_model_len
        if self.max_model_len > context:
            raise DataError(f"a context of {self.max_model_len} tokens was asked for; the target's is {context}")
        nodes = 0 if drafter is None else shape.num_nodes
        if runner is not None and runner.cache.num_slots <= self.max_model_len + nodes:
            raise ConfigError(
                f"the shared runner holds {runner.cache.num_slots} tokens; this decoder needs {self.max_model_len} for "
                f"prompt and answer and, with its root, {nodes + 1} for a tree ('{shape.name}')"
            )
        if drafts is not None and drafter is None:
            raise ConfigError("drafts were given without the drafter that makes them; give both or neither")
        self.target = target
        self.drafter = drafter
        self._name = "" if drafter is None else type(drafter).__name__.lower()
        sources: dict[str, DraftSource] = {}
        if drafter is not None:
            sources[self._name] = drafts or LocalDrafts(drafter, self.max_model_len, shape.num_expanded)
        config = EngineConfig(
            max_num_seqs=1,
            kv_cache_tokens=max(64, self.max_model_len + nodes + 1),
            max_model_len=self.max_model_len,
            max_num_batched_tokens=_PREFILL_TOKENS,
            tree=shape,
        )
        accept_rows = None if accept is None else row_by_row(accept)
        self._engine = Engine(
            target, config, (), drafts=sources, runner=runner, accept=accept_rows, selector=selector, is_timed=is_timed
        )

    @property
    def shape(self) -> AnyShape:
        """Shape of the trees; an adaptive one is limited to the drafter's depth."""
        return self._engine.draft_schedulers[self._name].shape if self.drafter is not None else _NO_DRAFT

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

        `sequence` numbers the prompt: prompts with different numbers are sampled with different noise.

        Raises:
            DataError: the prompt is empty or leaves no room in the context, or `max_new_tokens` is below 1.
        """
        if not 0 < len(prompt) < self.max_model_len:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; this context of {self.max_model_len} takes 1 to "
                f"{self.max_model_len - 1}"
            )
        most = longest_answer(max_new_tokens, self.max_model_len - len(prompt))
        name = None if self.drafter is None else self._name
        request = Request(prompt=tuple(prompt), params=params, max_new_tokens=most, sequence=sequence, drafter=name)
        if self.drafter is not None:
            self._engine.measure_costs({self._name: self.drafter})
        number = self._engine.submit(request, StopChecker(most, eos_ids, stop))
        try:
            return self._answer(on_tokens)
        finally:
            self._engine.cancel(number)  # after an error it would still run with the next prompt

    def _answer(self, on_tokens: OnTokens | None) -> Generation:
        engine, generation = self._engine, Generation([])
        before, begin = dict(engine.stats.seconds), time.perf_counter()
        prefilled, drafter_prefill = begin, 0.0
        while engine.is_busy:
            for update in engine.step():
                if not generation.tokens:
                    prefilled = time.perf_counter()
                generation.add(update)
                if on_tokens is not None:
                    on_tokens(update.tokens, update.num_accepted)
            if generation.num_cycles <= 1:  # sending the prompt to the drafter counts as prefill
                drafter_prefill = engine.stats.seconds["prefill_drafter"] - before["prefill_drafter"]
        end = time.perf_counter()
        generation.prefill_seconds = prefilled - begin + drafter_prefill
        generation.seconds = end - prefilled - drafter_prefill
        spent = {phase: seconds - before[phase] for phase, seconds in engine.stats.seconds.items()}
        spent["observe"] += spent["prefill_drafter"] - drafter_prefill
        generation.phases = {phase: spent[phase] for phase in CYCLE_PHASES}
        return generation
