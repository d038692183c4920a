"""Chooses what to draft next: depth, N, number of nodes, or nothing. It picks the most expected tokens per second.

    tokens of a cycle    rows + drafted rows * f * (a_1 + a_1 a_2 + ...)     a_k: acceptance at level k
    seconds of a cycle   pass over rows * (1 + nodes) tokens + request + draft of that depth + rest

f is the share of drafts that are not empty: prompt lookup often finds nothing, and the pass is then a plain one.

One controller serves one drafter of one engine, whether the engine runs one sequence or many. It knows what passes and
drafts cost on this machine (`CycleCosts`), how often drafts have been accepted recently (`Acceptance`), how many were
empty (`DraftYield`), when drafting that does not pay is tried again (`Probing`), and how much drafting has lost or
gained altogether (`LossBudget`). It looks at past cycles and at the scores of deterministic proposals, never at sampled
tokens, so the choice cannot change the output's distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from moray.decoding.planning.acceptance import Acceptance
from moray.decoding.planning.costs import CostTable
from moray.decoding.planning.cycle_costs import CycleCosts
from moray.decoding.planning.draft_yield import DraftYield
from moray.decoding.planning.loss_budget import LossBudget
from moray.decoding.planning.node_budget import best_node_count
from moray.decoding.planning.probing import Probing
from moray.trees.shapes import AdaptiveShape, AnyShape, GrowableShape

_MIN_GAIN = 1.02
"""Tokens per second that drafting must promise, relative to plain decoding: costs are not known more precisely."""


@dataclass(frozen=True)
class DraftPlan:
    """What to draft for each sequence of a cycle."""

    shape: GrowableShape
    num_target_layers: int = 0
    """N (see `Drafter.layer_counts`)."""


class SpeculationController:
    """Chooses the drafts of one drafter, cycle by cycle."""

    def __init__(self, shape: AnyShape, layer_counts: Sequence[int] = (0,), *, is_remote: bool = False) -> None:
        """
        Args:
            shape: what may be drafted. A shape that is not adaptive is always drafted, with the first N. An adaptive
                one is drafted at full depth until costs are known.
            layer_counts: values of N to choose from, cheapest first.
            is_remote: whether drafts are made in other processes, so that their time is the time spent waiting for
                them.
        """
        self._shape, self._layer_counts = shape, tuple(layer_counts)
        self._plans: dict[tuple[int, int], DraftPlan] = {}
        """What may be chosen, by N and depth; empty if there is no choice."""
        if isinstance(shape, AdaptiveShape):
            shapes = {levels: shape.at(levels) for levels in range(1, shape.depth + 1)}
            self._plans = {(n, levels): DraftPlan(at, n) for n in layer_counts for levels, at in shapes.items()}
        else:
            self._fixed = DraftPlan(shape, self._layer_counts[0])
        self._costs = CycleCosts(self._layer_counts, is_remote=is_remote)
        self._acceptance = Acceptance(shape.depth, self._layer_counts)
        self._yield = DraftYield()
        self._probing = Probing()
        self._budget = LossBudget()
        self._overhead = 0.0
        """Seconds that this cycle has spent on the drafter so far."""
        self._reach = shape.depth
        """Maximum depth to draft: small after a pause, doubled each time that a draft of this depth was made."""

    def set_costs(self, costs: CostTable) -> None:
        """Use these measured costs."""
        self._costs.table = costs

    @property
    def needs_costs(self) -> bool:
        """Whether there is a choice to make and its costs are not known."""
        return bool(self._plans) and self._costs.table is None

    @property
    def is_in_trial(self) -> bool:
        """Whether a trial after a pause is under way, for which `NUM_TRIAL_DRAFTS` sequences draft."""
        return self._probing.is_in_trial

    # --- The choice ---

    def plan(self, num_rows: int, num_drafted: int) -> DraftPlan | None:
        """What to draft for `num_drafted` of the sequences in the next pass; None to draft nothing."""
        if not num_drafted:
            return None
        if not self._plans:
            return self._fixed
        if self.needs_costs:
            return self._plans[self._layer_counts[0], self._shape.depth]
        if self._budget.is_spent:
            return None
        best = self._best_plan(num_rows, num_drafted)
        if best is None and self._probing.start_probe_if_due():
            return self._plans[self._layer_counts[0], 1]
        return best

    def pays(self, num_rows: int) -> bool:
        """Whether drafts for all sequences of a pass are worth their time as far as is known; unlike `plan`, this makes
        no decision, so it uses up no trial."""
        if not self._plans or self.needs_costs:
            return True
        return not self._budget.is_spent and self._best_plan(num_rows, num_rows) is not None

    def _best_plan(self, num_rows: int, num_drafted: int) -> DraftPlan | None:
        """The plan of most tokens per second; None if none is better than plain decoding by `_MIN_GAIN`."""
        has_choice = len(self._layer_counts) > 1
        # With a choice of N, one that was rarely drafted with is rated as well as its few results allow, so that it is
        # tried until it is known. Its depth is then chosen by what is known.
        rates = {n: self._expected_rates(num_rows, num_drafted, n, in_doubt=has_choice) for n in self._layer_counts}
        n = max(rates, key=lambda n: max(rates[n].values()))  # on a tie the first, which is the cheapest
        plain = num_rows / self._costs.cycle_seconds(num_rows, 0, 0, 0, self._layer_counts[0])
        if max(rates[n].values()) <= _MIN_GAIN * plain:
            return None
        by_depth = self._expected_rates(num_rows, num_drafted, n) if has_choice else rates[n]
        return self._plans[n, max(by_depth, key=lambda levels: by_depth[levels])]

    def _expected_rates(self, num_rows: int, num_drafted: int, n: int, *, in_doubt: bool = False) -> dict[int, float]:
        """Expected tokens per second, by depth of the draft."""
        found, expected, survival = {}, float(num_rows), 1.0
        filled = self._yield.filled
        any_filled = 1.0 - (1.0 - filled) ** num_drafted
        rates = self._acceptance.rates(n, in_doubt=in_doubt)
        for depth, rate in enumerate(rates[: self._reach], start=1):
            survival *= rate
            expected += num_drafted * filled * survival
            seconds = self._costs.cycle_seconds(num_rows, num_drafted, self._expected_nodes(n, depth), depth, n)
            if any_filled < 1.0:
                plain = self._costs.cycle_seconds(num_rows, num_drafted, 0, depth, n)
                seconds = any_filled * seconds + (1.0 - any_filled) * plain
            found[depth] = expected / seconds
        return found

    def _expected_nodes(self, n: int, depth: int) -> int:
        """Expected number of verified nodes in a draft of `depth` levels.

        Uses as many nodes per level as pruning kept recently, because acceptance was measured with those. Counting all
        nodes that a shape allows would price trees that are never verified.
        """
        return min(self._plans[n, depth].shape.num_nodes, math.ceil(depth * self._yield.nodes_per_level))

    def nodes_worth_verifying(self, plan: DraftPlan, log_probs: Sequence[Sequence[float]], num_rows: int) -> int:
        """How many of each drafted tree's best nodes to verify.

        Args:
            plan: plan of the drafts.
            log_probs: cumulative log-probabilities of the nodes of each tree, best first.
            num_rows: sequences in the pass, with and without drafts.
        """
        seconds_of = partial(self._seconds_with_nodes, plan, num_rows, len(log_probs))
        return best_node_count(log_probs, num_rows, self._yield.trust, seconds_of)

    def _seconds_with_nodes(self, plan: DraftPlan, num_rows: int, num_drafted: int, count: int) -> float:
        """Seconds of a cycle in which `count` nodes of each draft are verified."""
        return self._costs.cycle_seconds(num_rows, num_drafted, count, plan.shape.depth, plan.num_target_layers)

    # --- Times of cycles ---

    def record_cycle(self, num_rows: int, num_nodes: int, share: float) -> None:
        """Record that a cycle is over.

        Args:
            num_rows: sequences in its pass.
            num_nodes: nodes below the root of this drafter's largest tree in it; 0 without one.
            share: this drafter's share of the drafts in it.
        """
        self._budget.record_cycle()
        if self._costs.table is not None:
            longer = self._costs.plain_passes(num_rows, num_nodes) - 1.0
            self._budget.spend(share * longer + self._overhead / self._costs.pass_seconds(num_rows, 0))
        self._overhead = 0.0

    def record_pass(self, num_rows: int, num_nodes: int, seconds: float) -> None:
        """Record the time of a pass over trees of at most `num_nodes` nodes below their roots."""
        if self._costs.record_pass(num_rows, num_nodes, seconds):
            self._probing.probe_soon()

    def record_rest(self, num_rows: int, seconds: float) -> None:
        """Record the time of a cycle outside its pass and its drafts."""
        self._costs.record_rest(num_rows, seconds)

    def record_request(self, num_requested: int, num_rows: int, seconds: float) -> None:
        """Record the time it took to send new tokens of some sequences to the drafter and to request drafts."""
        if not self._is_partial_trial(num_requested, num_rows):
            self._costs.record_request(num_requested, seconds)

    def record_overhead(self, seconds: float) -> None:
        """Record time that a cycle spent on sending tokens to the drafter, requesting drafts and waiting for them."""
        self._overhead += seconds

    def record_untimed_draft(self, plan: DraftPlan, num_drafted: int) -> None:
        """Record drafts whose time is not known: they count as overhead with the time measured at start-up."""
        self._overhead += self._costs.draft_seconds(num_drafted, plan.shape.depth, plan.num_target_layers)

    def record_draft(self, plan: DraftPlan, num_drafted: int, num_rows: int, seconds: float | None) -> None:
        """Record how long the drafts for some sequences took, or how long they were waited for; None if that is not
        known or the draft was not a typical one."""
        is_partial_trial = self._is_partial_trial(num_drafted, num_rows)
        self._probing.record_draft(is_partial_trial=is_partial_trial)
        if is_partial_trial:
            return
        levels = plan.shape.depth
        if levels >= self._reach:
            self._reach = min(2 * self._reach, self._shape.depth)
        if seconds is not None and self._costs.record_draft(num_drafted, levels, plan.num_target_layers, seconds):
            self._probing.probe_soon()

    def _is_partial_trial(self, num_drafted: int, num_rows: int) -> bool:
        """Whether a trial drafts for only a few of many sequences: its time says nothing about drafting for all of
        them."""
        return self.is_in_trial and num_drafted < num_rows

    # --- Results of drafts ---

    def record(
        self,
        num_levels: int,
        num_accepted: int,
        num_target_layers: int | None = None,
        num_nodes: int = 0,
        promised: float = 0.0,
        num_drafted: int = 1,
        num_rows: int = 1,
    ) -> None:
        """Record the result of one sequence's draft.

        Args:
            num_levels: levels drafted.
            num_accepted: how many of them were accepted.
            num_target_layers: N of the draft; None for the first.
            num_nodes: nodes that were verified, if scores decided how many; otherwise 0.
            promised: sum of their probabilities.
            num_drafted: drafts that were requested for the same pass: together they age earlier ones by one cycle.
            num_rows: sequences in the pass.
        """
        n = self._layer_counts[0] if num_target_layers is None else num_target_layers
        cycles = 1.0 / num_drafted
        self._probing.record_result()
        self._yield.record_draft(is_empty=False, cycles=cycles)
        self._yield.record_nodes(num_levels, num_nodes, num_accepted, promised, cycles)
        self._acceptance.record(n, num_levels, num_accepted, cycles)
        self._budget.save(num_accepted / num_rows)

    def record_empty(self, num_drafted: int = 1) -> None:
        """Record that one sequence's draft, of so many for the same pass, was empty or did not arrive."""
        self._probing.record_result()
        self._yield.record_draft(is_empty=True, cycles=1.0 / num_drafted)

    # --- Pauses ---

    def pause(self, num_rows: int) -> None:
        """Record that no drafts were wanted in a cycle: pause drafting if it is not paused yet, then `decay`."""
        if self._probing.pause(num_rows):
            self._reach = max(1, self._shape.depth // num_rows)  # deep drafts of many sequences cost much if refused
            self._costs.pause()
        self.decay(num_rows)

    def decay(self, num_rows: int) -> None:
        """Record a cycle without drafts: what has not been tried for a long time returns to its initial estimate.

        After failed trials, only one in several such cycles counts.
        """
        if self._probing.record_idle(num_rows):
            self._costs.decay()
            self._acceptance.record(self._layer_counts[0], 0, 0)
            self._yield.decay()
