"""Adjusts the costs measured at start-up to the times of later cycles."""

from moray.decoding.planning.acceptance import DECAY

_COST_WEIGHT = 8.0
"""Weight of the measured cost, in cycles, against the cycles since then."""
_HICCUP = 2.0
"""A cycle counts as at most this many times its expected cost: more means that the machine did something else."""
_FAR_FASTER = 0.7
"""A cycle that takes less than this share of its measured cost shows that other work ran during the measurement."""


class Correction:
    """Ratio of actual to measured time, which changes with context length and machine load."""

    def __init__(self) -> None:
        self._ratios = self._count = 0.0

    @property
    def factor(self) -> float:
        """The ratio; the same for all sizes."""
        return (self._ratios + _COST_WEIGHT) / (self._count + _COST_WEIGHT)

    def record(self, measured: float, seconds: float) -> None:
        """Record that something with the cost `measured` took `seconds`."""
        ratio = min(seconds / max(measured, 1e-9), _HICCUP * self.factor)
        self.decay()
        self._ratios += ratio
        self._count += 1.0

    def decay(self) -> None:
        """A cycle has passed: what is not tried for a long time returns to its measured cost."""
        self._ratios *= DECAY
        self._count *= DECAY


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
        self.factor *= max(ratio, 0.1)  # the clock may not have advanced
        return True
