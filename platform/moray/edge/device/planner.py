"""How deep to draft on a device: the depth of most expected tokens per second over the connection that there is.

    tokens of a cycle     1 + a_1 + a_1 a_2 + ...                        a_k: acceptance at level k
    seconds of a cycle    draft of k levels + reply(k)

reply(k) is the time from sending a draft of k levels to its answer: round trip, wait at the server, the target's pass,
and the transfer of memory. It is fitted to the latest cycles as a line in k, so nothing has to be known of the network.
"""

from moray.decoding.planning.acceptance import Acceptance
from moray.trees.shapes import AdaptiveShape, AnyShape, GrowableShape

_FORGET = 0.9
"""Factor on the weight of a cycle's times for every cycle after it."""


class _Line:
    """seconds = base + slope * levels, fitted to the latest cycles; neither is negative."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, levels: int, seconds: float) -> None:
        for name, value in (("weight", 1), ("x", levels), ("y", seconds), ("xx", levels**2), ("xy", levels * seconds)):
            setattr(self, f"_{name}", _FORGET * getattr(self, f"_{name}") + value)

    def at(self, levels: int) -> float:
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-3 else 0.0
        slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
        return mean_y + slope * (levels - mean_x)


class DepthPlanner:
    """Chooses the shape of each draft."""

    def __init__(self, shape: AnyShape) -> None:
        """`shape` is what may be drafted; one that is not adaptive is always drafted."""
        self._shape = shape
        self._acceptance = Acceptance(shape.depth, (0,))
        self._reply = _Line()
        self._level_seconds = 0.0
        """Of drafting one level, over the latest drafts."""

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a draft, root not counted."""
        return self._shape.num_nodes

    def plan(self) -> GrowableShape:
        """What to draft next."""
        if not isinstance(self._shape, AdaptiveShape):
            return self._shape
        rates = self._acceptance.rates(0)
        best, best_rate, expected, survival = 1, 0.0, 1.0, 1.0
        for depth in range(1, self._shape.depth + 1):
            survival *= rates[depth - 1]
            expected += survival
            seconds = self._level_seconds * depth + self._reply.at(depth)
            rate = expected / seconds if seconds else expected
            if rate > best_rate:
                best, best_rate = depth, rate
        return self._shape.at(best)

    def record_draft(self, levels: int, seconds: float) -> None:
        """Record the time that a draft took."""
        each = seconds / max(1, levels)
        known = self._level_seconds
        self._level_seconds = _FORGET * known + (1 - _FORGET) * each if known else each

    def record_reply(self, levels: int, num_accepted: int, seconds: float) -> None:
        """Record the answer to a draft: how many levels were accepted, and the time since it was sent."""
        self._reply.add(levels, seconds)
        self._acceptance.record(0, levels, num_accepted)
