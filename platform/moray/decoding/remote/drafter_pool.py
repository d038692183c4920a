"""Which drafter process serves each sequence, and which processes are not tried for a while. Torch-free."""

import time
from abc import ABC, abstractmethod

from moray.decoding.remote.channel import Endpoint

_PAUSE_SECONDS = 1.0
"""How long a process that was given up is not tried again; the pause doubles each time, until the process answers."""
_LONGEST_PAUSE_SECONDS = 60.0


class DrafterPool(ABC):
    """Assigns drafter processes to sequences; called from the engine's thread, never waits."""

    @abstractmethod
    def open(self, session: str) -> None:
        """Start looking for a drafter process for a session."""

    @abstractmethod
    def find(self, session: str) -> Endpoint | None:
        """The session's drafter process, or None while there is none."""

    @abstractmethod
    def lose(self, session: str) -> None:
        """The process that was found does not answer: look for another."""

    @abstractmethod
    def close(self, session: str) -> None:
        """The session no longer needs a process."""


class CircuitBreaker:
    """Processes that were recently given up. An unreachable one costs its time limit only once per pause."""

    def __init__(self) -> None:
        self._until: dict[Endpoint, tuple[float, float]] = {}
        """When each process may be tried again, and how long its pause was."""

    def __contains__(self, endpoint: Endpoint) -> bool:
        return endpoint in self._until and time.monotonic() < self._until[endpoint][0]

    def add(self, endpoint: Endpoint) -> None:
        """Record that a process was given up."""
        now, (_, before) = time.monotonic(), self._until.get(endpoint, (0.0, _PAUSE_SECONDS / 2))
        pause = min(2 * before, _LONGEST_PAUSE_SECONDS)
        recent = {other: kept for other, kept in self._until.items() if now < kept[0] + _LONGEST_PAUSE_SECONDS}
        self._until = recent | {endpoint: (now + pause, pause)}

    def reset(self, endpoint: Endpoint) -> None:
        """Record that a process has answered."""
        self._until.pop(endpoint, None)
