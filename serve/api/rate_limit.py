"""How often somebody may ask: one token bucket for each, in bounded memory. Knows no HTTP."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_BUCKETS = 10_000


class RateLimit:
    """So many requests a minute for everybody, all of them at once if they like.

    A bucket that would be full again says nothing and is dropped. Beyond `max_buckets` the one that was used longest
    ago goes as well: then somebody may ask a little too often, but nobody can fill the memory.
    """

    def __init__(
        self, per_minute: int, max_buckets: int = MAX_BUCKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = float(per_minute)
        self._per_second = per_minute / 60
        self._max_buckets = max_buckets
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """What is left and when it was, by who asked; who asked last is last."""

    def take(self, who: Hashable) -> float:
        """Count a request; returns 0 if it may be answered, else the seconds until the next one may."""
        now = self._clock()
        left, since = self._buckets.pop(who, (self._most, now))
        left = min(self._most, left + (now - since) * self._per_second)
        may_ask = left >= 1
        self._buckets[who] = (left - 1 if may_ask else left, now)
        self._drop(now)
        return 0.0 if may_ask else (1 - left) / self._per_second

    @property
    def num_buckets(self) -> int:
        """Those that are remembered."""
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
