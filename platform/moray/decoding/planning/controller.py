"""Chooses what to draft next: depth, N, number of nodes, or nothing. It picks the most expected tokens per second.

    tokens of a cycle    rows + drafted rows * f * (a_1 + a_1 a_2 + ...)     a_k: acceptance at level k
    seconds of a cycle   pass over rows * (1 + nodes) tokens + request + draft of that depth + rest

f is the share of drafts that are not empty: prompt lookup often finds nothing, and the pass is then a plain one.

One controller serves one drafter of one engine, whether the engine runs one sequence or many. It knows what passes and
drafts cost on this machine (`CostTable`, measured once and corrected by the cycles since) and how often drafts have
been accepted recently (`Acceptance`). It looks at past cycles and at the scores of deterministic proposals, never at
sampled tokens, so the choice cannot change the output's distribution.

Drafting that does not pay is paused. A trial after the pause shows whether it pays again, and each failed trial makes
the next pause longer: a useless drafter costs almost nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moray.decoding.planning.acceptance import FORGET, PRIOR_WEIGHT, Acceptance
from moray.decoding.planning.corrections import Correction, CostScale
from moray.decoding.planning.costs import CostTable
from moray.trees.shapes import AdaptiveShape, AnyShape, GrowableShape

_MIN_GAIN = 1.02
"""Tokens per second that drafting must promise, relative to plain decoding: costs are not known more precisely."""
_PROVEN_CYCLES = 20
"""Drafted cycles in a row after which a trial of drafting counts as a success."""
_MAX_FAILED_TRIALS = 5
"""Each failed trial doubles the pause until the next one, up to this many times (but see `_PATIENCE_PER_ROW`)."""
_PATIENCE_PER_ROW = 16
"""Failed trials lengthen a pause at most by this factor per sequence, because a trial with more sequences costs more.
So a sequence that is alone again does not wait as long as many did."""
NUM_TRIED = 4
"""Number of drafts in a trial of whether drafts are accepted again, if there are that many sequences."""
PROBE_CYCLES = 32
"""Cycles without a draft after which one level is drafted whatever its measured cost. Without such probes, costs that
were measured while other work ran would end drafting for good. Each probe doubles the wait for the next one, unless it
was far cheaper than measured."""
_MEMORY = 8.0
"""Cycles over which costs that calibration does not measure are averaged."""


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
            is_remote: whether drafts are made in other processes. The time of a draft is then the time spent waiting
                for it.
        """
        self._shape, self._layer_counts, self._is_remote = shape, tuple(layer_counts), is_remote
        depth = shape.depth
        self._plans: dict[tuple[int, int], DraftPlan] = {}
        if isinstance(shape, AdaptiveShape):
            shapes = {levels: shape.at(levels) for levels in range(1, depth + 1)}
            self._plans = {(n, levels): DraftPlan(at, n) for n in layer_counts for levels, at in shapes.items()}
        else:
            self._fixed = DraftPlan(shape, self._layer_counts[0])
        self._costs: CostTable | None = None
        self._acceptance = Acceptance(depth, self._layer_counts)
        self._reach = depth
        """Maximum depth to draft: small after a pause, doubled each time that a draft of this depth was made."""

        self._verify, self._draft = Correction(), Correction()
        self._draft_of = {num_target_layers: Correction() for num_target_layers in layer_counts}
        self._root_scale, self._tree_scale = CostScale(), CostScale()
        """For passes over roots alone, and over trees."""
        self._draft_scale = {num_target_layers: CostScale() for num_target_layers in layer_counts}
        self._rest = 0.0
        """Seconds per sequence of everything else in a cycle."""
        self._asks: dict[int, float] = {}
        """Seconds for sending new tokens to drafters and requesting drafts, by bit length of the number of
        sequences."""
        self._are_asks_old = False
        """Whether `_asks` is from before the last pause: the next measurement then replaces all of them."""

        self._num_answered = self._num_filled = 0.0
        """Drafts, and how many of them were not empty."""
        self._promised = self._kept = 0.0
        """Accepted nodes that the scores of pruned trees promised, and those really accepted."""
        self._levels = self._nodes = 0.0
        """Levels and nodes of pruned trees."""

        self._num_drafted = self._num_idle = 0
        """Consecutive cycles with drafts, not counting trials on a few of many sequences, and cycles without drafts
        since then."""
        self._num_to_try = self._num_tried = 0
        """Drafts in the last trial, and how many of their results are known."""
        self._num_failed_trials = 0
        self._probe_at = PROBE_CYCLES
        """Cycles without drafts before the next probe."""

    def set_costs(self, costs: CostTable) -> None:
        """Use these measured costs."""
        self._costs = costs

    @property
    def needs_costs(self) -> bool:
        """Whether there is a choice to make and its costs are not known."""
        return bool(self._plans) and self._costs is None

    @property
    def is_trying(self) -> bool:
        """Whether a trial after a pause is under way, for which `NUM_TRIED` sequences draft."""
        return self._num_tried < self._num_to_try

    # --- The choice ---

    def plan(self, num_rows: int, num_drafted: int) -> DraftPlan | None:
        """What to draft for `num_drafted` of the sequences in the next pass; None to draft nothing."""
        if not num_drafted:
            return None
        if not self._plans:
            return self._fixed
        if self._costs is None:
            return self._plans[self._layer_counts[0], self._shape.depth]
        best = self._best_plan(num_rows, num_drafted)
        if best is None and self._num_idle >= self._probe_at:
            self._probe_at = 2 * max(self._probe_at, PROBE_CYCLES)
            return self._plans[self._layer_counts[0], 1]
        return best

    def _best_plan(self, num_rows: int, num_drafted: int) -> DraftPlan | None:
        num_target_layers = self._layer_counts[0]
        least = _MIN_GAIN * num_rows / self._seconds(num_rows, 0, 0, 0, num_target_layers)
        if len(self._layer_counts) > 1:
            hopes = {
                n: max(self._promises(num_rows, num_drafted, n, in_doubt=True).values()) for n in self._layer_counts
            }
            num_target_layers = max(hopes, key=lambda n: hopes[n])  # on a tie the first, which is the cheapest
            if hopes[num_target_layers] <= least:
                return None
        promises = self._promises(num_rows, num_drafted, num_target_layers)
        depth = max(promises, key=lambda levels: promises[levels])
        if len(self._layer_counts) == 1 and promises[depth] <= least:
            return None
        return self._plans[num_target_layers, depth]

    def _promises(
        self, num_rows: int, num_drafted: int, num_target_layers: int, *, in_doubt: bool = False
    ) -> dict[int, float]:
        """Expected tokens per second, by depth of the draft."""
        promises, expected, survival = {}, float(num_rows), 1.0
        filled = (self._num_filled + PRIOR_WEIGHT) / (self._num_answered + PRIOR_WEIGHT)
        any_filled = 1.0 - (1.0 - filled) ** num_drafted
        rates = self._acceptance.rates(num_target_layers, in_doubt=in_doubt)
        for depth, rate in enumerate(rates[: self._reach], start=1):
            survival *= rate
            expected += num_drafted * filled * survival
            seconds = self._seconds(
                num_rows, num_drafted, self._expected_nodes(num_target_layers, depth), depth, num_target_layers
            )
            if any_filled < 1.0:
                plain = self._seconds(num_rows, num_drafted, 0, depth, num_target_layers)
                seconds = any_filled * seconds + (1.0 - any_filled) * plain
            promises[depth] = expected / seconds
        return promises

    def _expected_nodes(self, num_target_layers: int, depth: int) -> int:
        """Expected number of verified nodes in a draft of `depth` levels.

        Uses as many nodes per level as pruning kept recently, because acceptance was measured with those; one at first,
        as in a chain. Counting all nodes that a shape allows would price trees that are never verified.
        """
        per_level = (self._nodes + PRIOR_WEIGHT) / (self._levels + PRIOR_WEIGHT)
        return min(self._plans[num_target_layers, depth].shape.num_nodes, math.ceil(depth * per_level))

    def nodes_worth_verifying(self, plan: DraftPlan, log_probs: Sequence[Sequence[float]], num_rows: int) -> int:
        """How many of each drafted tree's best nodes to verify.

        If the drafter is well calibrated, the expected number of accepted nodes is the sum of their probabilities; the
        running ratio of accepted to promised nodes corrects it. All trees get the same number, because a pass takes as
        long as if all of its trees were as large as the largest.

        Args:
            plan: plan of the drafts.
            log_probs: cumulative log-probabilities of the nodes of each tree, best first.
            num_rows: sequences in the pass, with and without drafts.
        """
        trust = (self._kept + PRIOR_WEIGHT) / (self._promised + PRIOR_WEIGHT)
        best, best_rate, total = 1, 0.0, 0.0
        for count in range(1, max(map(len, log_probs)) + 1):
            total += sum(math.exp(own[count - 1]) for own in log_probs if count <= len(own))
            seconds = self._seconds(num_rows, len(log_probs), count, plan.shape.depth, plan.num_target_layers)
            rate = (num_rows + trust * total) / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    # --- Costs ---

    def _seconds(
        self, num_rows: int, num_drafted: int, num_nodes: int, num_levels: int, num_target_layers: int
    ) -> float:
        """Time of a cycle that drafts `num_levels` levels and verifies `num_nodes` nodes below each root."""
        seconds = self._verify_seconds(num_rows, num_nodes) * self._verify.factor + self._rest * num_rows
        if num_levels:
            seconds += (
                self._draft_seconds(num_drafted, num_levels, num_target_layers)
                * self._draft_of[num_target_layers].factor
            )
            seconds += self._ask_seconds(num_drafted)
        return seconds

    def _verify_seconds(self, num_rows: int, num_nodes: int) -> float:
        """The measured time, scaled."""
        assert self._costs is not None
        scale = self._tree_scale if num_nodes else self._root_scale
        return self._costs.verify_seconds(num_rows, num_nodes + 1) * scale.factor

    def _draft_seconds(self, num_drafted: int, num_levels: int, num_target_layers: int) -> float:
        """The measured time, scaled, and corrected by drafts with any N."""
        assert self._costs is not None
        measured = self._costs.draft_seconds(num_drafted, num_levels, num_target_layers)
        return measured * self._draft_scale[num_target_layers].factor * self._draft.factor

    def _ask_seconds(self, num_asked: int) -> float:
        """The time for the most similar number of sequences that was requested recently."""
        size = num_asked.bit_length()
        return self._asks[min(self._asks, key=lambda known: abs(known - size))] if self._asks else 0.0

    def record_pass(self, num_rows: int, num_nodes: int, seconds: float) -> None:
        """Record the time of a pass over trees of at most `num_nodes` nodes below their roots."""
        if self._costs is None:
            return
        scale = self._tree_scale if num_nodes else self._root_scale
        if scale.lower(self._costs.verify_seconds(num_rows, num_nodes + 1), seconds):
            self._probe_at = 1
        else:
            self._verify.record(self._verify_seconds(num_rows, num_nodes), seconds)

    def record_rest(self, num_rows: int, seconds: float) -> None:
        """Record the time of a cycle outside its pass and its drafts."""
        self._rest += (seconds / num_rows - self._rest) / _MEMORY

    def record_ask(self, num_asked: int, num_rows: int, seconds: float) -> None:
        """Record the time it took to send new tokens of some sequences to the drafter and to request drafts."""
        if self._is_partial_trial(num_asked, num_rows):
            return
        if self._are_asks_old:
            self._asks, self._are_asks_old = {}, False
        size = num_asked.bit_length()
        known = self._asks.setdefault(size, seconds)
        self._asks[size] += (min(seconds, 2 * known) - known) / _MEMORY

    def record_draft(self, plan: DraftPlan, num_drafted: int, num_rows: int, seconds: float | None) -> None:
        """Record how long the drafts for some sequences took, or how long they were waited for; None if that is not
        known or the draft was not a typical one."""
        self._num_idle = 0
        if self._is_partial_trial(num_drafted, num_rows):
            return
        self._num_drafted += 1
        if self._num_drafted == _PROVEN_CYCLES:
            self._probe_at = PROBE_CYCLES
        levels, num_target_layers = plan.shape.depth, plan.num_target_layers
        if levels >= self._reach:
            self._reach = min(2 * self._reach, self._shape.depth)
        if self._costs is None or seconds is None:
            return
        measured, own = (
            self._costs.draft_seconds(num_drafted, levels, num_target_layers),
            self._draft_of[num_target_layers],
        )
        if not self._is_remote and self._draft_scale[num_target_layers].lower(measured, seconds):
            self._probe_at = 1
        else:
            self._draft.record(measured * self._draft_scale[num_target_layers].factor, seconds)
            own.record(self._draft_seconds(num_drafted, levels, num_target_layers), seconds)
        for other in self._draft_of.values():
            if other is not own:
                other.decay()

    def _is_partial_trial(self, num_drafted: int, num_rows: int) -> bool:
        """Whether a trial drafts for only a few of many sequences: its time says nothing about drafting for all of
        them."""
        return self.is_trying and num_drafted < num_rows

    # --- Acceptance ---

    def record(
        self,
        num_levels: int,
        num_accepted: int,
        num_target_layers: int | None = None,
        num_nodes: int = 0,
        promised: float = 0.0,
    ) -> None:
        """Record the result of one sequence's draft.

        Args:
            num_levels: levels drafted.
            num_accepted: how many of them were accepted.
            num_target_layers: N of the draft; None for the first.
            num_nodes: nodes that were verified, if scores decided how many; otherwise 0.
            promised: sum of their probabilities.
        """
        self._record_filled(1.0)
        self._acceptance.record(
            self._layer_counts[0] if num_target_layers is None else num_target_layers, num_levels, num_accepted
        )
        self._promised = self._promised * FORGET + promised
        self._kept = self._kept * FORGET + (num_accepted if num_nodes else 0)
        self._levels = self._levels * FORGET + (num_levels if num_nodes else 0)
        self._nodes = self._nodes * FORGET + num_nodes

    def record_empty(self) -> None:
        """Record that one sequence's draft was empty or did not arrive."""
        self._record_filled(0.0)

    def _record_filled(self, filled: float) -> None:
        self._num_tried += 1
        self._num_answered = self._num_answered * FORGET + 1.0
        self._num_filled = self._num_filled * FORGET + filled

    # --- Pauses ---

    def pause(self, num_rows: int) -> None:
        """Record that no drafts were wanted in a cycle: pause drafting if it is not paused yet, then `decay`."""
        if self._num_tried or not self._num_to_try:
            is_proven = self._num_drafted >= _PROVEN_CYCLES
            self._num_failed_trials = 0 if is_proven else min(self._num_failed_trials + 1, _MAX_FAILED_TRIALS)
            self._reach = max(1, self._shape.depth // num_rows)  # deep drafts of many sequences cost much if refused
            self._num_drafted = self._num_idle = self._num_tried = 0
            self._num_to_try = min(NUM_TRIED, num_rows)
            self._are_asks_old = True
        self.decay(num_rows)

    def decay(self, num_rows: int) -> None:
        """Record a cycle without drafts: what has not been tried for a long time returns to its initial estimate.

        After failed trials, only one in several such cycles counts.
        """
        self._num_idle += 1
        if self._num_idle % min(2**self._num_failed_trials, _PATIENCE_PER_ROW * num_rows) == 0:
            self._draft.decay()
            for own in self._draft_of.values():
                own.decay()
            self._asks = {size: FORGET * seconds for size, seconds in self._asks.items()}
            self._acceptance.record(self._layer_counts[0], 0, 0)
            self._num_answered, self._num_filled = self._num_answered * FORGET, self._num_filled * FORGET
            self._promised, self._kept = self._promised * FORGET, self._kept * FORGET
            self._levels, self._nodes = self._levels * FORGET, self._nodes * FORGET
