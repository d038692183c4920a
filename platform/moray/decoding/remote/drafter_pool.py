"""Where sequences are drafted: who says so, and which processes are left alone for a while. Torch-free."""

import time
from abc import ABC, abstractmethod

from moray.decoding.remote.channel import Endpoint

_PAUSE_SECONDS = 1.0
"""For which a place that was given up is not tried again; twice as long each time, until it answers."""
_LONGEST_PAUSE_SECONDS = 60.0


class DrafterPool(ABC):
    """Who says which drafter process has a place for a sequence; called from the engine's thread, never waits."""

    @abstractmethod
    def open(self, session: str) -> None:
        """Look for a place."""

    @abstractmethod
    def find(self, session: str) -> Endpoint | None:
        """The place, once there is one."""

    @abstractmethod
    def lose(self, session: str) -> None:
        """The place that was found does not answer: look for another."""

    @abstractmethod
    def close(self, session: str) -> None:
        """The place is not needed any longer."""


class CircuitBreaker:
    """Places that were given up lately. What cannot be reached costs its time limit once in a while, not ever again."""

    def __init__(self) -> None:
        self._until: dict[Endpoint, tuple[float, float]] = {}
        """When each may be tried again, and how long its pause was."""

    def __contains__(self, place: Endpoint) -> bool:
        return place in self._until and time.monotonic() < self._until[place][0]

    def add(self, place: Endpoint) -> None:
        """It was given up."""
        now, (_, before) = time.monotonic(), self._until.get(place, (0.0, _PAUSE_SECONDS / 2))
        pause = min(2 * before, _LONGEST_PAUSE_SECONDS)
        recent = {other: kept for other, kept in self._until.items() if now < kept[0] + _LONGEST_PAUSE_SECONDS}
        self._until = recent | {place: (now + pause, pause)}

    def forgive(self, place: Endpoint) -> None:
        """It has answered."""
        self._until.pop(place, None)
