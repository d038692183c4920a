"""One direction of an emulated network: when each packet leaves, by rate, delay, jitter and loss. No sockets here.

    packet ->  lost?  ->  queue at the rate  ->  delay  ->  out, in order

The delay is drawn once for each busy period of the queue, and anew after 50 ms. One draw per packet would make every
window of a transfer wait for its slowest packet, which no radio link does.
"""

import random
from collections import deque

from moray.edge.link.profiles import LinkProfile

_REDRAW_SECONDS = 0.05
_MAX_QUEUED_SECONDS = 0.5
"""Packets that would wait longer than this for the line are dropped, as a router's queue would drop them."""


class Direction:
    """Packets on their way in one direction."""

    def __init__(self, profile: LinkProfile, seed: int = 0) -> None:
        """
        Args:
            profile: what the network is like.
            seed: of its random numbers.
        """
        self.profile = profile
        self._random = random.Random(seed)
        self._packets: deque[tuple[float, bytes]] = deque()
        """(when it leaves, packet), in order."""
        self._line_free_at = 0.0
        self._delay = 0.0
        self._drawn_at = float("-inf")
        self._last = 0.0
        self.num_bytes = 0
        self.num_lost = 0
        self.num_dropped = 0

    def put(self, packet: bytes, now: float) -> None:
        """A packet arrives."""
        if self._random.random() < self.profile.loss:
            self.num_lost += 1
            return
        is_idle = self._line_free_at <= now
        begin = max(now, self._line_free_at)
        if begin - now > _MAX_QUEUED_SECONDS:
            self.num_dropped += 1
            return
        self._line_free_at = begin + len(packet) * 8 / (self.profile.rate_mbit * 1e6)
        if (is_idle and not self._packets) or now - self._drawn_at > _REDRAW_SECONDS:
            mean, deviation = self.profile.one_way
            self._delay = max(0.0, self._random.gauss(mean, deviation))
            self._drawn_at = now
        self._last = max(self._last, self._line_free_at + self._delay)
        self._packets.append((self._last, packet))
        self.num_bytes += len(packet)

    def take(self, now: float) -> list[bytes]:
        """The packets that leave now."""
        out: list[bytes] = []
        while self._packets and self._packets[0][0] <= now:
            out.append(self._packets.popleft()[1])
        return out

    @property
    def next_at(self) -> float | None:
        """When the next packet leaves; None if there is none."""
        return self._packets[0][0] if self._packets else None
