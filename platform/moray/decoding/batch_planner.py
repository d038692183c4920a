"""How deep to draft for a whole batch: the depth that promises most tokens per second, down to none.

    tokens of a cycle    rows + drafted rows * (a_1 + a_1 a_2 + ...)        a_k: acceptance at level k, lately
    seconds of a cycle   pass over rows * (1 + depth) tokens + asking, and draft of so many levels, for the drafted rows

Costs are measured at the start and corrected by the cycles since (see `decoding.adapt`, for one sequence). What was
given up is tried again, from one level of a few sequences on, and the more rarely the more often that was in vain: in a
large batch a deep draft that is refused costs as much as several passes, and each sequence needs a place at a drafter.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping

from moray.decoding.acceptance import FORGET, Acceptance
from moray.decoding.adapt import PROBE_CYCLES, Correction, CostScale
from moray.decoding.costs import Costs
from moray.trees.shapes import AdaptiveShape, AnyShape, GrowableShape

_LEAST_GAIN = 1.02
"""Of what is promised with drafts over what is without: costs are not known better than that."""
_PROVEN = 20
"""Drafted cycles in a row after which drafting was not in vain."""
_PATIENCE_PER_ROW, _MOST_PATIENCE = 8, 32
"""Most cycles that count for one, after tries in vain. The more sequences, the dearer a try: their passes are deeper,
each of those tried needs a place at a drafter, and less is gained if it is not in vain."""
_MOST_VAIN = _MOST_PATIENCE.bit_length() - 1
"""Tries in vain that are counted: more of them make no difference."""
NUM_TRIED = 4
"""Drafts by which it is tried whether they are accepted again."""
_MEMORY = 8.0
"""Cycles over which what is simply measured is averaged."""


class BatchPlanner:
    """Chooses the shape of the next drafts of one engine."""

    def __init__(self, shape: AnyShape) -> None:
        """A shape that is not adaptive is always drafted; until costs are known, an adaptive one at its full depth."""
        self._shape = shape
        self._costs: Mapping[int, Costs] = {}
        self._sizes: list[int] = []
        depth = shape.depth
        self._shapes = {d: shape.at(d) for d in range(1, depth + 1)} if isinstance(shape, AdaptiveShape) else {}
        self._acceptance = Acceptance(depth, [0])
        self._verify, self._draft = Correction(), Correction()
        self._root_scale, self._tree_scale = CostScale(), CostScale()
        """Of passes over roots alone, and over trees."""
        self._probe_at = PROBE_CYCLES
        """Cycles without drafts before the next probe (see `adapt.PROBE_CYCLES`)."""
        self._rest = 0.0
        """Seconds per row of what every cycle does besides."""
        self._asks: dict[int, float] = {}
        """Seconds that it takes to tell drafters what is new and to ask them, by the bits of the number of rows."""
        self._are_asks_old = False
        """Whether those are from before the last pause: the next one says more than all of them."""
        self._reach = depth
        """Levels that may be drafted: after a pause few, and twice as many each time that they all were."""
        self._num_drafted = 0
        """Times in a row that drafts were collected, tries apart."""
        self._num_idle = 0
        """Cycles since drafts were given up, or first."""
        self._num_tried = NUM_TRIED
        """Drafts since the last pause of which is known what became of them."""
        self._num_vain = 0
        """Times in a row that drafts were given up before they had proven themselves."""

    def know(self, costs: Mapping[int, Costs]) -> None:
        """What was measured: by rows of a pass, ascending; `draft` is what drafts for all of them take."""
        self._costs, self._sizes = costs, sorted(costs)

    def next_shape(self, num_rows: int, num_drafted: int) -> GrowableShape | None:
        """What to draft for `num_drafted` of the rows of the next pass; None for no draft at all."""
        if not num_drafted:
            return None
        if not isinstance(self._shape, AdaptiveShape):
            return self._shape
        if not self._costs:
            return self._shapes[len(self._shapes)]
        best, most = 0, _LEAST_GAIN * num_rows / self._seconds(num_rows, 0, 0)
        survival, expected = 1.0, float(num_rows)
        for depth, rate in enumerate(self._acceptance.rates(0)[: self._reach], start=1):
            survival *= rate
            expected += num_drafted * survival
            promise = expected / self._seconds(num_rows, num_drafted, depth)
            if promise > most:
                best, most = depth, promise
        if not best and self._num_idle >= self._probe_at:
            self._probe_at = 2 * max(self._probe_at, PROBE_CYCLES)
            best = 1
        return self._shapes.get(best)

    @property
    def is_trying(self) -> bool:
        """Whether drafts should be asked for `NUM_TRIED` sequences alone. What those take is not recorded, for it says
        nothing of what many would."""
        return self._num_tried < NUM_TRIED

    def record(self, num_levels: int, num_accepted: int) -> None:
        """What became of one sequence's draft."""
        self._num_tried += 1
        self._acceptance.record(0, num_levels, num_accepted)

    def forget(self, num_rows: int) -> None:
        """No draft was wanted while so many sequences run: they are given up, if they were not before, and `fade`."""
        if self._num_tried:
            self._num_vain = 0 if self._num_drafted >= _PROVEN else min(self._num_vain + 1, _MOST_VAIN)
            self._reach, self._num_drafted, self._num_idle = 1, 0, 0
            self._are_asks_old = True
            self._num_tried = 0
        self.fade(num_rows)

    def fade(self, num_rows: int) -> None:
        """A cycle has passed without drafts: what is not tried for long is believed to be as it was at first.

        Of so many cycles one counts: twice as many each time that drafts were tried in vain.
        """
        self._num_idle += 1
        most = min(_PATIENCE_PER_ROW * num_rows, _MOST_PATIENCE)
        if self._num_idle % min(2**self._num_vain, most) == 0:
            self._draft.forget()
            self._asks = {size: FORGET * seconds for size, seconds in self._asks.items()}
            self._acceptance.record(0, 0, 0)

    def record_pass(self, num_rows: int, num_nodes: int, seconds: float) -> None:
        """What a pass over rows of at most `num_nodes` tokens took."""
        if not self._costs:
            return
        measured = self._at(num_rows, lambda costs: costs.verify_seconds(num_nodes))
        scale = self._tree_scale if num_nodes > 1 else self._root_scale
        if scale.lower(measured, seconds):
            self._probe_at = 1
        else:
            self._verify.record(measured * scale.factor, seconds)

    def record_rest(self, num_rows: int, seconds: float) -> None:
        """What a cycle took besides its pass and its drafts."""
        self._rest += (seconds / num_rows - self._rest) / _MEMORY

    def record_ask(self, num_asked: int, seconds: float) -> None:
        """What it took to tell the drafter of so many rows what is new, and to ask it."""
        if self.is_trying:
            return
        if self._are_asks_old:
            self._asks, self._are_asks_old = {}, False
        size = num_asked.bit_length()
        known = self._asks.setdefault(size, seconds)
        self._asks[size] += (min(seconds, 2 * known) - known) / _MEMORY

    def record_draft(self, num_drafted: int, depth: int, seconds: float) -> None:
        """How long drafts for so many rows had to be waited for."""
        self._num_idle = 0
        if self.is_trying:
            return
        self._num_drafted += 1
        if self._num_drafted == _PROVEN:
            self._probe_at = PROBE_CYCLES
        if depth >= self._reach:
            self._reach = min(2 * self._reach, self._shape.depth)
        if self._costs:
            self._draft.record(self._at(num_drafted, lambda costs: costs.draft_seconds(depth)), seconds)

    def _seconds(self, num_rows: int, num_drafted: int, depth: int) -> float:
        nodes = self._shapes[depth].num_nodes if depth else 0
        scale = self._tree_scale if depth else self._root_scale
        seconds = self._at(num_rows, lambda costs: costs.verify_seconds(nodes + 1)) * scale.factor * self._verify.factor
        seconds += self._rest * num_rows
        if depth:
            seconds += self._at(num_drafted, lambda costs: costs.draft_seconds(depth)) * self._draft.factor
            seconds += self._ask_seconds(num_drafted)
        return seconds

    def _ask_seconds(self, num_asked: int) -> float:
        """As for the most similar number of rows that was asked for lately."""
        size = num_asked.bit_length()
        return self._asks[min(self._asks, key=lambda known: abs(known - size))] if self._asks else 0.0

    def _at(self, num_rows: int, seconds_of: Callable[[Costs], float]) -> float:
        """Between the measured numbers of rows lines are drawn."""
        index = bisect_left(self._sizes, num_rows)
        if index == len(self._sizes) or self._sizes[index] == num_rows or index == 0:
            return seconds_of(self._costs[self._sizes[min(index, len(self._sizes) - 1)]])
        low, high = self._sizes[index - 1], self._sizes[index]
        before, after = seconds_of(self._costs[low]), seconds_of(self._costs[high])
        return before + (after - before) * (num_rows - low) / (high - low)
