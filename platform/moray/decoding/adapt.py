"""How much to draft next, and how hard to try: depth, nodes and effort that promise most tokens per second.

Knows two things: what a cycle costs on this machine (`Costs`, measured once, corrected by the cycles since), and how
often drafts have been accepted lately (`Acceptance`). The best choice maximises E[tokens] / (verify + draft + rest),
and is no draft at all where drafting would be a loss. It looks at past cycles, and at the scores of deterministic
proposals, never at sampled tokens: so the choice cannot bend the output's distribution.
"""

import math
from collections.abc import Mapping

from moray.decoding.acceptance import FORGET, PRIOR_WEIGHT, Acceptance
from moray.decoding.costs import Costs
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape

_COST_WEIGHT = 8.0
"""Cycles that what was measured at the start counts for, against cycles since."""
_HICCUP = 2.0
"""What took longer than so many times what was expected counts for no more: the machine did something else."""
_FAR_FASTER = 0.7
"""A cycle that takes less than this share of its measured cost shows that other work ran during the measurement."""
PROBE_CYCLES = 32
"""Cycles without a draft after which one level is drafted whatever its measured cost. Without such probes, costs that
were measured while other work ran would end drafting for good. Each probe doubles the wait for the next one, unless it
was far cheaper than measured."""

_SUCCESS_CYCLES = 20
"""Drafted cycles in a row that make a try of drafting a success."""
_MOST_DOUBLINGS = 5
"""Each failed try doubles the time until the next one, up to so many times."""


class Correction:
    """How much longer something really takes than was measured; it changes with the context and the machine's load."""

    def __init__(self) -> None:
        self._ratios = self._count = 0.0

    @property
    def factor(self) -> float:
        """Of what was measured; one for all sizes."""
        return (self._ratios + _COST_WEIGHT) / (self._count + _COST_WEIGHT)

    def record(self, measured: float, seconds: float) -> None:
        """What was measured to take so long has taken `seconds`."""
        ratio = min(seconds / max(measured, 1e-9), _HICCUP * self.factor)
        self.forget()
        self._ratios += ratio
        self._count += 1.0

    def forget(self) -> None:
        """A cycle has passed: what is not tried for long is believed to be as it was measured."""
        self._ratios *= FORGET
        self._count *= FORGET


class CostScale:
    """Scales down costs that were measured while the machine did other work.

    A cycle that is far faster than the measured cost lowers the scale for good: other work can only add time, so the
    measured cost was too high.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def lower(self, measured: float, seconds: float) -> bool:
        """Lower the scale if a cycle took far less than the scaled cost; returns whether it did."""
        ratio = seconds / max(measured * self.factor, 1e-9)
        if ratio >= _FAR_FASTER:
            return False
        self.factor *= max(ratio, 0.1)  # a clock may stand still
        return True


class DraftPlanner:
    """Chooses the draft of each cycle of one decoder."""

    def __init__(self, shape: AdaptiveShape, costs: Mapping[int, Costs]) -> None:
        """
        Args:
            shape: what may be chosen.
            costs: of each of the drafter's efforts, cheapest first.
        """
        self._costs = costs
        self._shapes = {depth: shape.at(depth) for depth in range(1, shape.depth + 1)}
        self._verify, self._draft = Correction(), Correction()
        self._draft_of = {effort: Correction() for effort in costs}
        self._root_scale, self._tree_scale = CostScale(), CostScale()
        """Of passes over the root alone, and over trees."""
        self._draft_scale = {effort: CostScale() for effort in costs}
        self._rest = 0.0
        self._observe = 0.0
        """Seconds that the drafter takes per drafted cycle to observe what was verified."""
        self._acceptance = Acceptance(shape.depth, list(costs))
        self._num_drafted = self._num_idle = 0
        """Cycles in a row with a draft, and since then without."""
        self._num_failed_tries = 0
        """Tries in a row that ended before `_SUCCESS_CYCLES` drafted cycles."""
        self._probe_at = PROBE_CYCLES
        """Cycles without a draft before the next probe."""
        self._promised = self._kept = 0.0
        self._sum_of_probabilities = 0.0
        self._num_levels = self._num_nodes = 0
        self._levels = self._nodes = 0.0
        self.effort = next(iter(costs))
        """That the shape given last is to be drafted with."""

    def next_shape(self) -> ChainShape | DynamicShape | None:
        """The shape to draft now, with `effort`; None for no draft."""
        shape = self._best_shape()
        if shape is None and self._num_idle >= self._probe_at:
            self._probe_at = 2 * max(self._probe_at, PROBE_CYCLES)
            self._num_levels, shape = 1, self._shapes[1]
        return shape

    def _best_shape(self) -> ChainShape | DynamicShape | None:
        self._num_levels, self._num_nodes = 0, 0
        self._sum_of_probabilities = 0.0
        without = 1.0 / self._seconds(0, 0, self.effort)
        if len(self._costs) > 1:
            hopes = {effort: max(self._promises(effort, in_doubt=True).values()) for effort in self._costs}
            self.effort = max(hopes, key=lambda effort: hopes[effort])  # of equals the first, which is the cheapest
            if hopes[self.effort] <= without:
                return None
        promises = self._promises(self.effort)
        best = max(promises, key=lambda depth: promises[depth])
        if len(self._costs) == 1 and promises[best] <= without:
            return None
        self._num_levels = best
        return self._shapes[best]

    def _promises(self, effort: int, *, in_doubt: bool = False) -> dict[int, float]:
        """Tokens per second of every draft, by depth."""
        promises, expected, survival = {}, 1.0, 1.0
        for depth, rate in enumerate(self._acceptance.rates(effort, in_doubt=in_doubt), start=1):
            survival *= rate
            expected += survival
            promises[depth] = expected / self._seconds(self._expected_nodes(depth), depth, effort)
        return promises

    def _seconds(self, num_nodes: int, num_levels: int, effort: int) -> float:
        """A cycle that drafts so many levels and verifies so many nodes below the root."""
        verify = self._measured_verify(num_nodes, effort) * self._verify.factor
        draft = self._draft_seconds(num_levels, effort) * self._draft_of[effort].factor
        return verify + draft + (self._observe if num_levels else 0.0) + self._rest

    def _draft_seconds(self, num_levels: int, effort: int) -> float:
        """What was measured, as far as cycles of any effort have corrected it."""
        return self._measured_draft(num_levels, effort) * self._draft.factor

    def _measured_verify(self, num_nodes: int, effort: int) -> float:
        """The measured cost of a pass, scaled."""
        scale = self._tree_scale if num_nodes else self._root_scale
        return self._costs[effort].verify_seconds(num_nodes + 1) * scale.factor

    def _measured_draft(self, num_levels: int, effort: int) -> float:
        """The measured cost of a draft, scaled."""
        return self._costs[effort].draft_seconds(num_levels) * self._draft_scale[effort].factor

    def budget(self, log_probs: list[float]) -> int:
        """How many of a tree's best nodes to verify (see `trees.grow.Budget`).

        If the drafter knows itself, the expected number of accepted nodes is the sum of their probabilities; the
        running ratio of what was accepted to what was promised corrects it.
        """
        trust = (self._kept + PRIOR_WEIGHT) / (self._promised + PRIOR_WEIGHT)
        best, best_rate, best_sum, total = 1, 0.0, 0.0, 0.0
        for count, log_prob in enumerate(log_probs, start=1):
            total += math.exp(log_prob)
            rate = (1.0 + trust * total) / self._seconds(count, self._num_levels, self.effort)
            if rate > best_rate:
                best, best_rate, best_sum = count, rate, total
        self._sum_of_probabilities = best_sum
        self._num_nodes = min(best, len(log_probs))
        return best

    def record_seconds(
        self, num_nodes: int, verify: float, draft: float | None, rest: float = 0.0, observe: float = 0.0
    ) -> None:
        """What a cycle's target pass over `num_nodes` nodes below the root took, its draft, what the drafter observed
        for it, and what every cycle does.

        The draft is None where it was another than usual, and teaches nothing: behind a pause the drafter catches up.
        Where phases are not known exactly (a GPU that nobody waits for) this is not called, and what was measured
        stands.
        """
        costs = self._costs[self.effort]
        scale = self._tree_scale if num_nodes else self._root_scale
        if scale.lower(costs.verify_seconds(num_nodes + 1), verify):
            self._probe_at = 1
        else:
            self._verify.record(self._measured_verify(num_nodes, self.effort), verify)
        others = dict(self._draft_of)
        if self._num_levels and draft is not None:
            self._observe += (observe - self._observe) / _COST_WEIGHT
            own = others.pop(self.effort)
            if self._draft_scale[self.effort].lower(costs.draft_seconds(self._num_levels), draft):
                self._probe_at = 1
            else:
                self._draft.record(self._measured_draft(self._num_levels, self.effort), draft)
                own.record(self._draft_seconds(self._num_levels, self.effort), draft)
        else:
            self._draft.forget()
        for other in others.values():
            other.forget()
        self._rest += (rest - self._rest) / _COST_WEIGHT

    def record(self, num_levels: int, num_accepted: int) -> None:
        """What became of a cycle: levels verified, and how many of them were accepted."""
        if self._is_counted(num_levels):
            self._acceptance.record(self.effort, num_levels, num_accepted)
        self._promised = self._promised * FORGET + self._sum_of_probabilities
        self._kept = self._kept * FORGET + (num_accepted if self._sum_of_probabilities else 0.0)
        self._levels = self._levels * FORGET + (num_levels if self._num_nodes else 0)
        self._nodes = self._nodes * FORGET + self._num_nodes

    def _is_counted(self, num_levels: int) -> bool:
        """Whether this cycle updates the acceptance estimate.

        Cycles with a draft always do. A cycle without one lets the estimate drift back to its prior, which leads to the
        next try; after n failed tries in a row only every 2^n-th such cycle counts, so that a useless drafter is
        rarely tried.
        """
        if self._num_levels or num_levels:  # a draft that was asked for may be empty
            self._num_drafted += 1
            self._num_idle = 0
            if self._num_drafted == _SUCCESS_CYCLES:
                self._probe_at = PROBE_CYCLES
            return True
        if not self._num_idle:
            self._num_failed_tries = (
                0 if self._num_drafted >= _SUCCESS_CYCLES else min(self._num_failed_tries + 1, _MOST_DOUBLINGS)
            )
            self._num_drafted = 0
        self._num_idle += 1
        return self._num_idle % 2**self._num_failed_tries == 0

    def _expected_nodes(self, depth: int) -> int:
        """That a draft of so many levels will have verified."""
        most = self._shapes[depth].num_nodes
        return min(most, math.ceil(depth * self._nodes_per_level()))

    def _nodes_per_level(self) -> float:
        """Nodes that the budget lately kept, by level that holds any: what acceptance was measured with.

        One at first, as in a chain: to count all that a shape allows would price trees that the budget never lets be
        verified.
        """
        return (self._nodes + PRIOR_WEIGHT) / (self._levels + PRIOR_WEIGHT)
