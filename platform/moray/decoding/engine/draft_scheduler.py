"""Manages one draft source: chooses what to draft, sends newly verified tokens, and requests drafts.

The scheduler sends verified tokens to the source only when it wants a draft, so a sequence without drafts costs
nothing. Keys and values are still in the cache then; each sequence stores its own hidden states.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from moray.decoding.engine.draft_source import DraftJob, DraftSource
from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.decoding.engine.observer import MAX_TOKENS, Observer
from moray.decoding.engine.sequence import EngineSequence
from moray.decoding.engine.stats import EngineStats
from moray.decoding.planning.controller import DraftPlan, SpeculationController
from moray.decoding.planning.fitting import depth_notice, fit_shape
from moray.decoding.planning.probing import NUM_TRIAL_DRAFTS
from moray.drafters.common.rows import on_device
from moray.targets.model import Target
from moray.trees.ranking import Pruned, prune
from moray.trees.shapes import AdaptiveShape, AnyShape
from moray.trees.tree import TokenTree

_FEW = 16
"""A sequence with at most this many new tokens is sent in one batch with others."""


Refusal = Literal["not worth it", "too few"]
"""Why the controller wants no drafts: they are not worth their time, or not for only those sequences that have a
drafter."""


@dataclass(frozen=True)
class Draft:
    """A sequence's draft of one cycle."""

    tree: TokenTree
    num_target_layers: int
    """N that it was drafted with."""
    promised: float | None = None
    """Sum of its nodes' probabilities, if they decided how many nodes were kept."""


class DraftScheduler:
    """One draft source and the sequences that use it."""

    def __init__(
        self,
        name: str,
        source: DraftSource,
        shape: AnyShape,
        target: Target,
        cache: BatchedKVCache,
        stats: EngineStats,
        *,
        is_timed: bool = True,
        needs_scores: bool = False,
    ) -> None:
        """`is_timed` says whether draft times are known: without waiting for a GPU, only the launch is timed.
        `needs_scores` says whether drafts must come with the drafter's scores.

        Raises:
            ConfigError: the source cannot draft such trees.
        """
        self.source = source
        self.observed = source.observed
        self.shape = fit_shape(shape, name, source.max_depth, target.spec.vocab_size)
        self.notices = depth_notice(shape, name, self.shape)
        """Warnings about settings that have no effect here; the engine's builder logs them."""
        self.controller = SpeculationController(self.shape, source.layer_counts, is_remote=source.is_remote)
        self._is_timed = is_timed
        self._target = target
        self._observer = Observer(source.observe, source.observed, cache)
        self._stats = stats
        self._prunes = isinstance(self.shape, AdaptiveShape) and self.shape.breadth > 1
        """Whether trees are cut down to the nodes that are worth verifying."""
        self._needs_scores = needs_scores or self._prunes
        self._refusal: Refusal | None = None
        """Why the controller asked for no drafts when it was last asked; None if it asked for some."""
        self._is_behind = False
        """Whether the source first had to be sent many tokens of the sequences that it drafts for now."""
        self._num_requested = self._num_rows = 1
        """Drafts requested for the pass under way, and sequences in it."""

    def expect(self, number: int, num_running: int) -> None:
        """Let the source prepare for a new sequence if drafts are likely to be wanted; `num_running` includes it."""
        if not self.controller.is_in_trial and self.controller.pays(num_running):
            self.source.open(number)

    def request(self, running: list[EngineSequence], rows: list[int], num_rows: int) -> None:
        """Start drafting for those sequences in `rows` without a draft under way; the next pass has `num_rows`
        sequences."""
        idle = [row for row in rows if running[row].requested is None]
        if not idle:
            return
        plan, chosen = self._choose(running, idle, num_rows)
        if plan is not None and chosen:
            begin = time.perf_counter()
            self._request(running, plan, chosen, num_rows)
            self._record_overhead(begin)

    def _choose(
        self, running: list[EngineSequence], idle: list[int], num_rows: int
    ) -> tuple[DraftPlan | None, list[int]]:
        """What to draft, and for which rows; None to draft nothing."""
        plan = self.controller.plan(num_rows, len(idle))
        self._refusal = "not worth it" if plan is None else None
        if plan is None:
            return None, []
        if self.controller.is_in_trial:  # prefer sequences that already have a drafter, then those it knows best
            idle = sorted(idle, key=lambda row: self._catch_up_cost(running[row]))
            idle = idle[: max(0, NUM_TRIAL_DRAFTS - self._num_under_way(running))]
        for row in idle:
            self.source.open(running[row].number)
        ready = [row for row in idle if self.source.can_draft(running[row].number)]
        if len(ready) < len(idle) and not self.controller.is_in_trial:  # fewer drafts may call for another plan
            plan = self.controller.plan(num_rows, len(ready))
            self._refusal = "too few" if plan is None else None
        return plan, ready

    def _catch_up_cost(self, sequence: EngineSequence) -> tuple[bool, int]:
        """Orders sequences by what a draft takes: whether a drafter must be found for it, and tokens to be sent."""
        number = sequence.number
        return not self.source.can_draft(number), sequence.length - self.source.num_known(number)

    def _request(self, running: list[EngineSequence], plan: DraftPlan, rows: list[int], num_rows: int) -> None:
        """Send the source the tokens that it does not know, and request a draft for each row."""
        unknown = {row: running[row].length - self.source.num_known(running[row].number) for row in rows}
        many = {row: count for row, count in unknown.items() if count > _FEW}
        few = {row: count for row, count in unknown.items() if 0 < count <= _FEW}
        self._is_behind = bool(many)
        self._send_backlog(running, many)
        begin = time.perf_counter()
        self._send_new(running, few)
        n = plan.num_target_layers if len(self.source.layer_counts) > 1 else None
        sequences = [running[row] for row in rows]
        self.source.submit(
            [
                DraftJob(s.number, s.tokens[-1], s.length, plan.shape, s.sampler, n, self._needs_scores)
                for s in sequences
            ]
        )
        if self._is_timed and len(many) <= len(rows) // 8:  # sending whole prompts is not typical
            self.controller.record_request(len(rows), num_rows, time.perf_counter() - begin)
        for sequence in sequences:
            sequence.requested = plan

    def collect(self, running: list[EngineSequence], rows: list[int], num_rows: int) -> dict[int, Draft]:
        """Return the requested drafts, by row, for a pass over `num_rows`; those that did not arrive in time are
        missing."""
        plans = {row: plan for row in rows if (plan := running[row].requested) is not None}
        if not plans:
            if rows and not self._num_under_way(running):
                self._record_no_draft(len(running))
            return {}
        begin = time.perf_counter()
        drafts = self._wait_for(running, plans)
        seconds = time.perf_counter() - begin if self._is_timed and not self._is_behind else None
        self._num_requested, self._num_rows = len(plans), num_rows
        # Drafts that were requested together share a plan. Those requested at another time may have another one; the
        # deepest took the longest.
        deepest = max(plans.values(), key=lambda plan: plan.shape.depth)
        self.controller.record_draft(deepest, len(plans), num_rows, seconds)
        if self._prunes:
            drafts |= self._pruned(drafts, deepest, num_rows)
        self._record_empty(drafts, len(plans))
        self._record_overhead(begin)
        if not self._is_timed:
            self.controller.record_untimed_draft(deepest, len(plans))
        return drafts

    def _wait_for(self, running: list[EngineSequence], plans: Mapping[int, DraftPlan]) -> dict[int, Draft]:
        """The requested drafts that arrive in time, by row; no request is under way afterwards."""
        numbers = {row: running[row].number for row in plans}
        found = self.source.collect([*numbers.values()])
        self._stats.num_missed += len(plans) - len(found)
        for row in plans:
            running[row].requested = None
        return {
            row: Draft(found[number], plans[row].num_target_layers)
            for row, number in numbers.items()
            if number in found
        }

    def _record_overhead(self, begin: float) -> None:
        """Record the time since `begin` as time that plain decoding would not have taken."""
        if self._is_timed:
            self.controller.record_overhead(time.perf_counter() - begin)

    def _record_no_draft(self, num_running: int) -> None:
        """Record a cycle without drafts, if that was the controller's choice."""
        if self._refusal == "not worth it":
            self.controller.pause(num_running)
        elif self._refusal == "too few":
            self.controller.decay(num_running)

    def _record_empty(self, drafts: Mapping[int, Draft], num_requested: int) -> None:
        """Record drafts in which the drafter found nothing; the others are recorded once they are verified."""
        num_empty = sum(draft.tree.num_nodes == 1 for draft in drafts.values())
        if self.controller.is_in_trial:  # otherwise the time spent waiting counts against late drafts
            num_empty += num_requested - len(drafts)
        for _ in range(num_empty):
            self.controller.record_empty(num_requested)

    def _pruned(self, drafts: Mapping[int, Draft], plan: DraftPlan, num_rows: int) -> dict[int, Draft]:
        """Prune the drafts that have nodes to the nodes worth verifying."""
        grown = {row: draft for row, draft in drafts.items() if draft.tree.scores is not None}
        if not grown or self.controller.needs_costs:
            return {}

        def choose(log_probs: list[list[float]]) -> int:
            return self.controller.nodes_worth_verifying(plan, log_probs, num_rows)

        pruned: list[Pruned] = prune([draft.tree for draft in grown.values()], choose)
        return {
            row: Draft(tree, draft.num_target_layers, promised)
            for (row, draft), (tree, promised) in zip(grown.items(), pruned, strict=True)
        }

    def record(self, draft: Draft, num_accepted: int) -> None:
        """Record how much of a draft was accepted."""
        tree, is_pruned = draft.tree, draft.promised is not None
        self.controller.record(
            tree.max_depth,
            num_accepted,
            draft.num_target_layers,
            num_nodes=tree.num_nodes - 1 if is_pruned else 0,
            promised=draft.promised or 0.0,
            num_drafted=self._num_requested,
            num_rows=self._num_rows,
        )

    def _num_under_way(self, sequences: Iterable[EngineSequence]) -> int:
        return sum(sequence.draft_scheduler is self and sequence.requested is not None for sequence in sequences)

    def _send_backlog(self, running: list[EngineSequence], unknown: dict[int, int]) -> None:
        """Send cached tokens that the source does not know yet, `unknown` many of each row, one row at a time."""
        with self._stats.timed("prefill_drafter"):
            for row, count in unknown.items():
                for begin in range(0, count, MAX_TOKENS):
                    self._observe(running, {row: min(MAX_TOKENS, count - begin)})

    def _send_new(self, running: list[EngineSequence], unknown: dict[int, int]) -> None:
        """Like `_send_backlog`, but all rows in one batch."""
        if unknown:
            with self._stats.timed("observe"):
                self._observe(running, unknown)

    def _observe(self, running: list[EngineSequence], counts: dict[int, int]) -> None:
        """Send the next `counts[row]` tokens of each row, all rows at once."""
        source = self.source
        sequences = {row: running[row] for row in counts}
        begins = {row: source.num_known(sequence.number) for row, sequence in sequences.items()}
        memory = self._observer.memory_of(sequences, begins, counts)
        for row, sequence in sequences.items():
            begin, count = begins[row], counts[row]
            tokens = on_device(self._target.device, sequence.tokens[begin : begin + count])
            source.extend(sequence.number, tokens, memory[row], min(sequence.num_kept, count))
            sequence.num_kept = 0


def record_cycle(
    draft_schedulers: Collection[DraftScheduler],
    sequences: list[EngineSequence],
    trees: list[TokenTree],
    phases: tuple[float, float] | None,
) -> None:
    """Tell the controllers of a cycle; `phases` are the seconds of its pass and of the rest, None if not known."""
    sizes = [(s.draft_scheduler, tree.num_nodes - 1) for s, tree in zip(sequences, trees, strict=True)]
    most, num_drafted = max(size for _, size in sizes), sum(size > 0 for _, size in sizes)
    for scheduler in draft_schedulers:
        own = [size for owner, size in sizes if owner is scheduler and size]
        scheduler.controller.record_cycle(len(sequences), max(own, default=0), len(own) / max(1, num_drafted))
        if phases is not None:
            verify_seconds, rest_seconds = phases
            scheduler.controller.record_pass(len(sequences), most, verify_seconds)
            scheduler.controller.record_rest(len(sequences), rest_seconds)


def request_drafts(
    draft_schedulers: Iterable[DraftScheduler], sequences: list[EngineSequence], rows: Collection[int], num_rows: int
) -> None:
    """Request drafts, each from its sequence's source. A remote source can then start before the next pass."""
    for scheduler in draft_schedulers:
        scheduler.request(sequences, [row for row in rows if sequences[row].draft_scheduler is scheduler], num_rows)


def propose(
    draft_schedulers: Collection[DraftScheduler], sequences: list[EngineSequence], rows: Collection[int]
) -> dict[int, Draft]:
    """Collect the requested drafts from all sources, by row; rows without a request get one first."""
    request_drafts(draft_schedulers, sequences, rows, len(rows))
    found: dict[int, Draft] = {}
    for scheduler in draft_schedulers:
        own = [row for row in rows if sequences[row].draft_scheduler is scheduler]
        found |= scheduler.collect(sequences, own, len(rows))
    return found


def awaits_first_draft(sequence: EngineSequence, max_cycles: int) -> bool:
    """Whether a sequence that has just started should wait for its first draft. Joining the cycle now would make the
    others wait, because its draft is queued behind theirs. Drafts are made in the order of the requests, so after one
    cycle of all others the draft has arrived, or is late."""
    scheduler, is_requested = sequence.draft_scheduler, sequence.requested is not None
    if scheduler is None or not is_requested or sequence.num_passed_over >= max_cycles:
        return False
    return scheduler.source.is_under_way(sequence.number)
