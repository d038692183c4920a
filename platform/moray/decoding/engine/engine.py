"""Answers many sequences at once, with drafts or without: continuous batching of speculative decoding.

    step  = admit waiting sequences + read a chunk of prompts + one cycle of the running sequences
    cycle = propose (here or elsewhere) + one target pass over the trees of all + accept + commit + observe

With the default acceptance method an answer does not depend on the other sequences. Greedy answers equal the target's;
sampled ones use noise that is a function of seed, sequence and position, as in `plain.PlainDecoder`. In low precision,
near ties may be decided differently.

The engine knows nothing of Ray or HTTP. It reaches drafters only through a `DraftSource`.
"""

import time
from collections.abc import Collection, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from moray.decoding.device import synchronise
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_scheduler import (
    DraftScheduler,
    awaits_first_draft,
    propose,
    record_cycle,
    request_drafts,
)
from moray.decoding.engine.draft_source import DraftSource
from moray.decoding.engine.node_selection import NodeSelector, check_selectable, kept_part, selector_of
from moray.decoding.engine.outputs import emit, tree_of
from moray.decoding.engine.paced import ClientMemory, Offer, PacedSequences, can_join
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.engine.scheduler import Scheduler, longest_sequence
from moray.decoding.engine.sequence import EngineSequence, check_request, stop_checker_of
from moray.decoding.engine.stats import EngineStats
from moray.decoding.planning.measuring import measure_costs
from moray.decoding.request import Request, RequestOutput
from moray.decoding.sampling.accept import Accepted, AcceptRows, accept_rows
from moray.decoding.sampling.logits_processors import adjust
from moray.decoding.sampling.stop import Decode, StopChecker
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.targets.model import Target, TargetOutput
from moray.trees.grow import root_alone
from moray.trees.shapes import AdaptiveShape
from moray.trees.tree import TokenTree


class Engine:
    """The target, its KV cache and the sequences in it.

    Rows in use are contiguous (see `decoding.engine.scheduler`), so that no pass includes an idle row.
    """

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        eos_ids: Collection[int],
        *,
        drafts: Mapping[str, DraftSource] | None = None,
        paced: Mapping[str, Drafter] | None = None,
        max_offered_nodes: int = 0,
        decode: Decode | None = None,
        runner: TargetRunner | None = None,
        accept: AcceptRows | None = None,
        selector: NodeSelector | None = None,
        is_timed: bool = False,
    ) -> None:
        """
        Args:
            target: may be shared.
            config: limits.
            eos_ids: tokens that end an answer.
            drafts: draft sources by name; each request picks one, and the first is the default. None for plain
                decoding.
            paced: drafters that clients run, by the names that paced requests use; they only observe here.
            max_offered_nodes: maximum number of nodes below the root of a tree that a client offers.
            decode: the tokenizer's, for stop strings.
            runner: shared with other engines that take turns with this one; None for one of its own.
            accept: acceptance method that overrides the one in the sampling parameters.
            selector: of the nodes that a sparse target verifies; None for the one in `config`.
            is_timed: wait for the device after each phase, so that phases can be timed separately; costs some overlap.

        Raises:
            ConfigError: a tree does not fit its drafter or the vocabulary, or the limits do not fit the target.
        """
        self.target = target
        self.config = config
        wait = partial(synchronise, target.device) if is_timed else None
        self.stats = EngineStats(wait)
        self._is_timed = is_timed
        self._accept_rows = accept or accept_rows
        self._selector = selector or selector_of(target, config.select, config.tree)
        sources, paced = drafts or {}, paced or {}
        observed = [source.observed for source in sources.values()] + [drafter.observed for drafter in paced.values()]
        self._hidden_depths = sorted({depth for needs in observed for depth in needs.hidden_depths})
        self._rows = runner or TargetRunner(target, config.kv_cache_tokens, config.max_num_seqs)
        self._paced = PacedSequences(paced, self._rows.cache, 1 + max_offered_nodes)
        self.draft_schedulers = {
            name: DraftScheduler(
                name,
                source,
                config.tree,
                target,
                self._rows.cache,
                self.stats,
                is_timed=source.is_remote or self.has_exact_phases,
                needs_scores=self._selector is not None and self._selector.needs_scores,
            )
            for name, source in sources.items()
        }
        max_nodes = 1 + max((scheduler.shape.num_nodes for scheduler in self.draft_schedulers.values()), default=0)
        max_nodes = max(max_nodes, self._paced.max_nodes if paced else 0)
        self._eos_ids = frozenset(eos_ids)
        self._decode = decode
        self.max_model_len = longest_sequence(config, target.spec.max_positions, self._rows.cache.num_slots, max_nodes)
        """Maximum number of tokens of prompt and answer together."""
        self._scheduler = Scheduler(self._rows.cache, config, max_nodes)
        self._num_submitted = 0
        self._updates: list[RequestOutput] = []
        self._is_put_off = False

    def measure_costs(self, drafters: Mapping[str, Drafter]) -> None:
        """Measure what passes and drafts cost here, for each drafter whose plans depend on it.

        `drafters`, by the names of the draft sources, may draft in another process. Passes are measured once for all.
        """
        for name, scheduler in self.draft_schedulers.items():
            shape, controller = scheduler.shape, scheduler.controller
            if isinstance(shape, AdaptiveShape) and controller.needs_costs:
                max_rows, passes = self.config.max_num_seqs, self._rows.pass_seconds
                controller.set_costs(measure_costs(self.target, drafters[name], shape, max_rows, passes))

    def submit(self, request: Request, stop_checker: StopChecker | None = None) -> int:
        """Queue a request and return its number. `stop_checker` replaces the one that the request asks for.

        Raises:
            DataError: says what in the request cannot be served.
        """
        if request.drafter and request.drafter not in self.draft_schedulers:
            known = ", ".join(self.draft_schedulers) or "none"
            raise DataError(f"drafter is '{request.drafter}'; there are {known}: name one, or None")
        sequence = self._new_sequence(request, stop_checker)
        if request.drafter is not None:
            name = request.drafter or next(iter(self.draft_schedulers), "")
            sequence.draft_scheduler = self.draft_schedulers.get(name)
        if sequence.draft_scheduler is not None:
            check_selectable(request.params, self._selector)
        self._queue(sequence)
        return sequence.number

    def submit_paced(self, request: Request, client: ClientMemory) -> int:
        """Queue a request whose client drafts; return its number. After the first token, nothing is decoded until the
        client offers something (see `decoding.engine.paced`).

        Args:
            request: its `drafter` names one of the paced drafters.
            client: what its client has and needs of the drafter's memory.

        Raises:
            DataError: says what in the request cannot be served.
        """
        check_selectable(request.params, self._selector)
        pace = self._paced.pace_of(request, client)
        sequence = self._new_sequence(request, None)
        sequence.pace = pace
        self._queue(sequence)
        return sequence.number

    def offer(self, number: int, offer: Offer) -> None:
        """Take a tree from the client of a paced sequence.

        Raises:
            DataError: the sequence is not there, is not paced or has not been read yet, or the tree cannot be verified.
        """
        self._paced.offer(self._scheduler.decoding, number, offer)

    def _new_sequence(self, request: Request, stop_checker: StopChecker | None) -> EngineSequence:
        """Check a request and number it.

        Raises:
            DataError: says what in the request cannot be served.
        """
        check_request(request, self.target.spec.vocab_size, self.max_model_len)
        number = self._num_submitted
        self._num_submitted += 1
        checker = stop_checker or stop_checker_of(request, self._eos_ids, self._decode)
        return EngineSequence(number, request, self.target.spec.vocab_size, self.target.device, checker)

    def _queue(self, sequence: EngineSequence) -> None:
        if (reason := sequence.stop_checker.finish_reason) is not None:
            self._updates.append(RequestOutput(sequence.number, [], finish_reason=reason))
        else:
            self._scheduler.waiting.append(sequence)

    def cancel(self, number: int) -> None:
        """Forget a sequence, whatever its state, and its outputs that no step has returned yet; no effect if it has
        ended."""
        self._updates = [update for update in self._updates if update.number != number]
        for sequence in self._scheduler.waiting:
            if sequence.number == number:
                self._scheduler.waiting.remove(sequence)
                return
        if any(sequence.number == number for sequence in self._scheduler.active):
            self._release({number})

    @property
    def has_exact_phases(self) -> bool:
        """Whether the times of the phases are exact: on a CPU, or when each phase waits for the device."""
        return self._is_timed or self.target.device.type == "cpu"

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do; sequences that wait for their client's tree do not count."""
        scheduler = self._scheduler
        if self._updates or scheduler.running or scheduler.reading:
            return True
        if any(sequence.pace is None or can_join(sequence) for sequence in scheduler.starting):
            return True
        return bool(scheduler.waiting) and scheduler.can_admit

    @property
    def num_running(self) -> int:
        """Sequences that hold rows."""
        return self._scheduler.num_active

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._scheduler.waiting)

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that is reserved for sequences."""
        return self._scheduler.used_share

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Read one chunk of prompts and run one cycle; return what is new. A step with first tokens to return skips the
        cycle, so that they need not wait for it, but never twice in a row."""
        self.stats.num_steps += 1
        with self.stats.timed("admit"):
            self._admit()
        self._join()
        if self._scheduler.reading:
            with self.stats.timed("prefill"):
                self._read()
        self._is_put_off = bool(self._updates) and not self._is_put_off
        if self._scheduler.running and not self._is_put_off:
            self._cycle()
            self._park()
        updates, self._updates = self._updates, []
        ended = {update.number for update in updates if update.finish_reason is not None}
        self._release(ended)
        return updates

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            if sequence.draft_scheduler is not None:
                sequence.draft_scheduler.expect(sequence.number, self._scheduler.num_active)

    def _release(self, numbers: Collection[int]) -> None:
        if not numbers:
            return
        for sequence in self._scheduler.active:
            if sequence.number in numbers and sequence.draft_scheduler is not None:
                sequence.draft_scheduler.source.close(sequence.number)
        self._scheduler.update_rows(released=numbers)

    def _read(self) -> None:
        """Read the next chunk of every prompt; choose the first token of sequences whose prompt is complete."""
        first, reading = len(self._scheduler.decoding), self._scheduler.reading
        left = [len(sequence.tokens) - sequence.num_read for sequence in reading]
        new = min(max(1, self.config.max_num_batched_tokens // len(reading)), max(left))
        counts = [min(new, rest) for rest in left]
        tokens = [s.tokens[s.num_read : s.num_read + new] for s in reading]
        output = self._rows.read(first, tokens, [s.num_read for s in reading], self._hidden_depths)
        ready: list[int] = []
        for row, (sequence, count) in enumerate(zip(reading, counts, strict=True)):
            sequence.num_read += count
            sequence.keep_hidden(output.hidden, row, slice(0, count))
            if sequence.num_read == len(sequence.tokens):
                ready.append(row)
        self.stats.num_prompt_tokens += sum(counts)
        self._updates += self._paced.after_reading(first, reading)
        if ready:
            last = torch.stack([output.last[row, counts[row] - 1] for row in ready])
            begun = [reading[row] for row in ready]
            self._begin(begun, self.target.logits(last))
            self._release({s.number for s in begun if s.stop_checker.finish_reason is not None})
            self._scheduler.update_rows(begun={s.number for s in begun})

    def _join(self) -> None:
        """Let sequences join the cycles as soon as the others would not have to wait for their first drafts."""
        scheduler, num_micro_batches = self._scheduler, self.config.num_micro_batches
        if scheduler.starting:
            count = len(scheduler.decoding)
            self._request_drafts(range(len(scheduler.running), count), -(-count // num_micro_batches))
            most = min(num_micro_batches, len(scheduler.running))
            scheduler.update_rows(joined={s.number for s in scheduler.starting if self._may_join(s, most)})

    def _may_join(self, sequence: EngineSequence, max_cycles: int) -> bool:
        """Whether a sequence that is starting takes part in the next cycle."""
        if sequence.pace is None:
            return not awaits_first_draft(sequence, max_cycles)
        self._updates += self._paced.void_offers(sequence)
        return can_join(sequence)

    def _park(self) -> None:
        """Let paced sequences whose offers are answered wait for the next one."""
        waiting = {s.number for s in self._scheduler.running if s.pace is not None and not self._may_join(s, 0)}
        if waiting:
            self._scheduler.update_rows(parked=waiting)

    def _begin(self, sequences: list[EngineSequence], logits: Float[Tensor, "rows vocab"]) -> None:
        """Choose the first tokens of sequences whose prompts have been read."""
        chosen: list[Tensor] = []
        for row, sequence in enumerate(sequences):
            own = logits[row : row + 1]
            if sequence.processors.is_needed:
                own = sequence.processors.apply(own, None)
            chosen.append(sequence.sampler.choose(own, len(sequence.tokens)))
        for row, (sequence, token) in enumerate(zip(sequences, torch.cat(chosen).tolist(), strict=True)):
            first = emit(sequence, Accepted([], [], token), None, logits[row : row + 1], self.stats)
            self._updates.append(first)
            self.stats.num_tokens += 1

    def _cycle(self) -> None:
        """Propose, verify, accept and commit for the running sequences whose turn it is.

        Apart from drafting, it waits for the device once if acceptance is by choice (see `decoding.sampling.accept`).
        """
        rows, stats = self._scheduler.next_group(), self.stats
        running = self._scheduler.running[rows.start : rows.stop]
        began = time.perf_counter()
        with stats.timed("propose") as proposed:
            trees = self._propose(rows, running)
        with stats.timed("verify") as verify, self.config.synthetic.verify.spent(len(running)):
            begins = [sequence.length for sequence in running]
            output = self._rows.verify(rows.start, begins, trees, self._hidden_depths, self._selector)
            kept = kept_part(trees, output)
            logits = self.target.logits(kept.last)
            stats.num_passes += 1
        with stats.timed("accept"):
            results = self._accept(running, kept.trees, logits, begins)
        with stats.timed("commit"):
            drafted = kept.in_drafts(results)
            self._rows.keep(rows.start, begins, [result.path for result in drafted])
            self._note(running, trees, drafted, output)
            lengths = [begin + 1 + len(result.path) for begin, result in zip(begins, results, strict=True)]
            paced = self._paced.after_cycle(rows.start, running, lengths, verify.seconds)
            for row, (sequence, tree, result) in enumerate(zip(running, kept.trees, results, strict=True)):
                self._updates.append(emit(sequence, result, tree, logits[row], self.stats, paced.get(row)))
        rest = time.perf_counter() - began - proposed.seconds - verify.seconds
        phases = (verify.seconds, rest) if self.has_exact_phases else None
        record_cycle(self.draft_schedulers.values(), running, trees, phases)
        for sequence in self._scheduler.starting:
            sequence.num_passed_over += 1
        going_on = [row for row in rows if running[row - rows.start].stop_checker.finish_reason is None]
        self._request_drafts(going_on, len(rows))

    def _request_drafts(self, rows: Collection[int], num_rows: int) -> None:
        """Start the drafts of some rows, for a pass over `num_rows`."""
        with self.stats.timed("propose"):
            request_drafts(self.draft_schedulers.values(), self._scheduler.decoding, rows, num_rows)

    def _propose(self, rows: range, running: list[EngineSequence]) -> list[TokenTree]:
        """One tree for each sequence in `rows`; the root alone if there is no draft."""
        decoding = self._scheduler.decoding
        found = propose(self.draft_schedulers.values(), decoding, rows)
        for row, sequence in zip(rows, running, strict=True):
            sequence.draft = found.get(row)
        if len(found) == len(rows):
            return [found[row].tree for row in rows]
        roots = self._rows.to_device([[sequence.tokens[-1]] for sequence in running])
        return [tree_of(s) or root_alone(root) for s, root in zip(running, roots, strict=True)]

    def _accept(
        self,
        sequences: list[EngineSequence],
        trees: list[TokenTree],
        logits: Float[Tensor, "rows nodes vocab"],
        begins: list[int],
    ) -> list[Accepted]:
        """Apply each request's penalties and biases to the target's logits, then the acceptance method."""
        logits = adjust(logits, [sequence.processors for sequence in sequences], trees)
        return self._accept_rows(trees, logits, [sequence.sampler for sequence in sequences], begins)

    def _note(
        self, running: list[EngineSequence], trees: list[TokenTree], results: list[Accepted], output: TargetOutput
    ) -> None:
        """Keep what the drafters need of the accepted paths."""
        for row, (sequence, tree, result) in enumerate(zip(running, trees, results, strict=True)):
            if output.hidden:
                sequence.keep_hidden(output.hidden, row, self._rows.path_index(result.path))
            if tree.num_nodes > 1:
                sequence.num_kept = tree.num_kept(len(result.path))
