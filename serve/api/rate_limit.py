"""Rate limiting with one token bucket per client, in bounded memory. Independent of HTTP."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_BUCKETS = 10_000


class RateLimit:
    """Allows each client `per_minute` requests per minute, including all of them in one burst.

    Buckets that are full again carry no information and are dropped. Beyond `max_buckets`, the least recently used one
    is dropped too: a client may then exceed its limit slightly, but memory stays bounded.
    """

    def __init__(
        self, per_minute: int, max_buckets: int = MAX_BUCKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = float(per_minute)
        self._per_second = per_minute / 60
        self._max_buckets = max_buckets
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """(remaining tokens, time of the last update) by client; the most recently used client is last."""

    def take(self, who: Hashable) -> float:
        """Count a request; returns 0 if it is allowed, else the seconds until the next one is."""
        now = self._clock()
        left, since = self._buckets.pop(who, (self._most, now))
        left = min(self._most, left + (now - since) * self._per_second)
        may_ask = left >= 1
        self._buckets[who] = (left - 1 if may_ask else left, now)
        self._drop(now)
        return 0.0 if may_ask else (1 - left) / self._per_second

    @property
    def num_buckets(self) -> int:
        """Number of buckets in memory."""
        return len(self._buckets)

    def _drop(self, now: float) -> None:
        while True:
            left, since = next(iter(self._buckets.values()))
            is_full = left + (now - since) * self._per_second >= self._most
            if not is_full and len(self._buckets) <= self._max_buckets:
                return
            self._buckets.popitem(last=False)
            if not self._buckets:
                return
