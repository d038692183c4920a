"""How fast large messages come down: measured from the server's own timestamps, so a message needs no answer.

    transfer = arrived - max(sent + shortest way of all, arrival of the message before)

The server's clock differs from this one by a constant, which "shortest way" contains. Each message gives one transfer
time and one size; the slope of the line through them is the time of a byte. Jitter adds to the transfer times of all
sizes, so it moves the line, and hardly its slope.
"""

from collections import deque
from typing import NamedTuple

_NUM_LATEST = 64
"""Latest messages that count."""
_LARGE, _NUM_LARGE = 16_384, 8
"""So many messages of at least so many bytes count longer: they say most, and are rare (memory of a prompt)."""
_DOUBT = 500.0**2
"""Added to the variance of the sizes, in bytes squared: messages whose sizes differ by less than about 500 bytes say
little, and leave the time of a byte close to 0."""


class _Arrival(NamedTuple):
    delay: float
    """Seconds from sending to arrival, and the difference of the clocks."""
    since_last: float
    """Seconds since the arrival of the message before."""
    num_bytes: int


class Bandwidth:
    """The time of a byte from the server to this device."""

    def __init__(self) -> None:
        self._latest: deque[_Arrival] = deque(maxlen=_NUM_LATEST)
        self._large: deque[_Arrival] = deque(maxlen=_NUM_LARGE)
        self._shortest, self._last_arrival = float("inf"), -float("inf")
        self._slope = 0.0
        self._is_fitted = True

    def restart(self) -> None:
        """Another server process answers now, whose clock is another one: nothing that was measured can be compared
        with what comes, so the slope so far is kept until enough has come."""
        self._latest.clear()
        self._large.clear()
        self._shortest, self._last_arrival = float("inf"), -float("inf")
        self._is_fitted = True

    def record(self, sent: float, arrived: float, num_bytes: int) -> None:
        """Record a message: when it was sent, on the server's clock, and when it arrived, on this device's."""
        arrival = _Arrival(arrived - sent, arrived - self._last_arrival, num_bytes)
        self._shortest = min(self._shortest, arrival.delay)
        self._last_arrival = arrived
        (self._large if num_bytes >= _LARGE else self._latest).append(arrival)
        if len(self._latest) + len(self._large) >= _NUM_LARGE:
            self._is_fitted = False

    def seconds(self, num_bytes: float) -> float:
        """How long so many more bytes in a message take; 0 as long as nothing is known."""
        if not self._is_fitted:
            self._slope, self._is_fitted = self._fit(), True
        return num_bytes * self._slope

    def _fit(self) -> float:
        arrivals = [*self._latest, *self._large]
        transfers = [min(a.delay - self._shortest, a.since_last) for a in arrivals]
        count = len(arrivals)
        mean_bytes = sum(a.num_bytes for a in arrivals) / count
        mean_seconds = sum(transfers) / count
        spread = sum((a.num_bytes - mean_bytes) ** 2 for a in arrivals) + _DOUBT * count
        both = sum((a.num_bytes - mean_bytes) * (t - mean_seconds) for a, t in zip(arrivals, transfers, strict=True))
        return max(0.0, both / spread)
