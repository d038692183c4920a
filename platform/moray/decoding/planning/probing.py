"""When drafting that does not pay is tried again.

Drafting that does not pay is paused. A trial after the pause shows whether it pays again, and each failed trial makes
the next pause longer, so a useless drafter costs almost nothing. Apart from trials, a probe now and then drafts one
level whatever its measured cost: costs that were measured while other work ran would otherwise end drafting for good.
"""

_PROVEN_CYCLES = 20
"""Drafted cycles in a row after which a trial of drafting counts as a success."""
_MAX_FAILED_TRIALS = 5
"""Each failed trial doubles the pause until the next one, up to this many times (but see `_PATIENCE_PER_ROW`)."""
_PATIENCE_PER_ROW = 16
"""Failed trials lengthen a pause at most by this factor per sequence, because a trial with more sequences costs more.
So a sequence that is alone again does not wait as long as many did."""
NUM_TRIAL_DRAFTS = 4
"""Number of drafts in a trial of whether drafts are accepted again, if there are that many sequences."""
PROBE_CYCLES = 32
"""Cycles without a draft before a probe. Each probe doubles the wait for the next one, unless it was far cheaper than
measured."""


class Probing:
    """Counts cycles with and without drafts, and the results of trials."""

    def __init__(self) -> None:
        self._num_drafted = self._num_idle = 0
        """Cycles with drafts since the last pause, not counting trials on a few of many sequences, and cycles without
        drafts since the last draft."""
        self._num_trial_drafts = self._num_trial_results = 0
        """Drafts in the last trial, and how many of their results are known."""
        self._num_failed_trials = 0
        self._probe_at = PROBE_CYCLES
        """Cycles without drafts before the next probe."""

    @property
    def is_in_trial(self) -> bool:
        """Whether a trial after a pause is under way, for which `NUM_TRIAL_DRAFTS` sequences draft."""
        return self._num_trial_results < self._num_trial_drafts

    def start_probe_if_due(self) -> bool:
        """Return whether a probe is due; if so, double the wait for the next one."""
        if self._num_idle < self._probe_at:
            return False
        self._probe_at = 2 * max(self._probe_at, PROBE_CYCLES)
        return True

    def probe_soon(self) -> None:
        """Note that a cycle was far cheaper than measured: the next probe is due at once."""
        self._probe_at = 1

    def record_draft(self, *, is_partial_trial: bool) -> None:
        """Record a cycle with drafts."""
        self._num_idle = 0
        if not is_partial_trial:
            self._num_drafted += 1
            if self._num_drafted == _PROVEN_CYCLES:
                self._probe_at = PROBE_CYCLES

    def record_result(self) -> None:
        """Record that the result of one sequence's draft is known."""
        self._num_trial_results += 1

    def pause(self, num_rows: int) -> bool:
        """Begin a pause of drafting, and the trial that follows it; returns False if one has begun already."""
        if self._num_trial_drafts and not self._num_trial_results:
            return False
        is_proven = self._num_drafted >= _PROVEN_CYCLES
        self._num_failed_trials = 0 if is_proven else min(self._num_failed_trials + 1, _MAX_FAILED_TRIALS)
        self._num_drafted = self._num_idle = self._num_trial_results = 0
        self._num_trial_drafts = min(NUM_TRIAL_DRAFTS, num_rows)
        return True

    def record_idle(self, num_rows: int) -> bool:
        """Record a cycle without drafts; returns whether it counts: after failed trials, one in several does."""
        self._num_idle += 1
        return self._num_idle % min(2**self._num_failed_trials, _PATIENCE_PER_ROW * num_rows) == 0
