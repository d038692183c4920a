"""Seconds of a cycle on this machine: costs measured at start-up, corrected by the cycles since."""

from collections.abc import Sequence

from moray.decoding.planning.acceptance import DECAY
from moray.decoding.planning.corrections import Correction, CostScale
from moray.decoding.planning.costs import CostTable

_AVERAGING_CYCLES = 8.0
"""Cycles over which costs that calibration does not measure are averaged."""


class CycleCosts:
    """What passes, requests and drafts of one drafter cost."""

    def __init__(self, layer_counts: Sequence[int], *, is_remote: bool) -> None:
        """
        Args:
            layer_counts: values of N that the drafter can draft with.
            is_remote: whether drafts are made in other processes, so that their time includes waiting.
        """
        self.table: CostTable | None = None
        """As measured at start-up; None until then."""
        self._is_remote = is_remote
        self._verify, self._draft = Correction(), Correction()
        self._draft_of = {n: Correction() for n in layer_counts}
        """What distinguishes drafts with one N from drafts with any."""
        self._root_scale, self._tree_scale = CostScale(), CostScale()
        """For passes over roots alone, and over trees."""
        self._draft_scale = {n: CostScale() for n in layer_counts}
        self._rest = 0.0
        """Seconds per sequence of everything else in a cycle."""
        self._requests: dict[int, float] = {}
        """Seconds for sending new tokens to the drafter and requesting drafts, by bit length of the number of
        sequences."""
        self._has_requested = False
        """Whether a request has ever been timed."""
        self._are_requests_old = False
        """Whether `_requests` is from before the last pause: the next measurement then replaces all of them."""

    def cycle_seconds(self, num_rows: int, num_drafted: int, num_nodes: int, num_levels: int, n: int) -> float:
        """Time of a cycle.

        Args:
            num_rows: sequences in the pass.
            num_drafted: sequences that drafts are made for.
            num_nodes: nodes that are verified below each root.
            num_levels: levels that are drafted; 0 for no drafts.
            n: target layers that the drafter runs.
        """
        seconds = self._verify_seconds(num_rows, num_nodes) * self._verify.factor + self._rest * num_rows
        if num_levels:
            seconds += self._draft_seconds(num_drafted, num_levels, n) * self._draft_of[n].factor
            seconds += self._request_seconds(num_drafted)
        return seconds

    def pass_seconds(self, num_rows: int, num_nodes: int) -> float:
        """Time of a pass over trees of `num_nodes` nodes below their roots."""
        return max(self._verify_seconds(num_rows, num_nodes) * self._verify.factor, 1e-9)

    def plain_passes(self, num_rows: int, num_nodes: int) -> float:
        """How many plain passes take as long as one over trees of `num_nodes` nodes below their roots; at least 1."""
        return max(1.0, self.pass_seconds(num_rows, num_nodes) / self.pass_seconds(num_rows, 0))

    def draft_seconds(self, num_drafted: int, num_levels: int, n: int) -> float:
        """Time of drafts as measured at start-up; 0 if that was not done."""
        return 0.0 if self.table is None else self.table.draft_seconds(num_drafted, num_levels, n)

    def record_pass(self, num_rows: int, num_nodes: int, seconds: float) -> bool:
        """Record the time of a pass over trees of at most `num_nodes` nodes below their roots; returns whether it was
        far shorter than measured."""
        if self.table is None:
            return False
        scale = self._tree_scale if num_nodes else self._root_scale
        if scale.lower(self.table.verify_seconds(num_rows, num_nodes + 1), seconds):
            return True
        self._verify.record(self._verify_seconds(num_rows, num_nodes), seconds)
        return False

    def record_rest(self, num_rows: int, seconds: float) -> None:
        """Record the time of a cycle outside its pass and its drafts."""
        self._rest += (seconds / num_rows - self._rest) / _AVERAGING_CYCLES

    def record_request(self, num_requested: int, seconds: float) -> None:
        """Record the time it took to send new tokens to the drafter and to request drafts.

        The very first time counts as at most a draft of one level, because a drafter's first request may be slow: one
        took 36 ms. What that is worth in simulated decoding is in docs/results/decoding.md.
        """
        if self._are_requests_old:
            self._requests, self._are_requests_old = {}, False
        if not self._has_requested and self.table is not None:
            seconds = min(seconds, *(self.table.draft_seconds(num_requested, 1, n) for n in self._draft_of))
        self._has_requested = True
        size = num_requested.bit_length()
        known = self._requests.setdefault(size, seconds)
        self._requests[size] += (min(seconds, 2 * known) - known) / _AVERAGING_CYCLES

    def record_draft(self, num_drafted: int, num_levels: int, n: int, seconds: float) -> bool:
        """Record how long drafts took, or how long they were waited for; returns whether that was far shorter than
        measured."""
        if self.table is None:
            return False
        measured, own = self.table.draft_seconds(num_drafted, num_levels, n), self._draft_of[n]
        is_far_shorter = not self._is_remote and self._draft_scale[n].lower(measured, seconds)
        if not is_far_shorter:
            self._draft.record(measured * self._draft_scale[n].factor, seconds)
            own.record(self._draft_seconds(num_drafted, num_levels, n), seconds)
        for other in self._draft_of.values():
            if other is not own:
                other.decay()
        return is_far_shorter

    def pause(self) -> None:
        """Note that drafting pauses."""
        self._are_requests_old = True

    def decay(self) -> None:
        """Let the costs of drafting return towards those that were measured, and the costs of requests towards none."""
        self._draft.decay()
        for own in self._draft_of.values():
            own.decay()
        self._requests = {size: DECAY * seconds for size, seconds in self._requests.items()}

    def _verify_seconds(self, num_rows: int, num_nodes: int) -> float:
        """The measured time, scaled."""
        assert self.table is not None
        scale = self._tree_scale if num_nodes else self._root_scale
        return self.table.verify_seconds(num_rows, num_nodes + 1) * scale.factor

    def _draft_seconds(self, num_drafted: int, num_levels: int, n: int) -> float:
        """The measured time, scaled, and corrected by drafts with any N."""
        assert self.table is not None
        measured = self.table.draft_seconds(num_drafted, num_levels, n)
        return measured * self._draft_scale[n].factor * self._draft.factor

    def _request_seconds(self, num_requested: int) -> float:
        """The time for the most similar number of sequences that was requested recently."""
        size = num_requested.bit_length()
        return self._requests[min(self._requests, key=lambda known: abs(known - size))] if self._requests else 0.0
