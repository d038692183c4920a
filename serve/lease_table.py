"""Places of a drafter replica that targets hold: a lease for each, and how long it lasts."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from moray.decoding.remote.host import DraftHost


class LeaseTable:
    """Leases by sequence, of one event loop."""

    def __init__(self, host: DraftHost, idle_seconds: float) -> None:
        """
        Args:
            host: where the sequences are drafted.
            idle_seconds: a place that nobody has used for so long is given up.
        """
        self._host = host
        self._idle_seconds = idle_seconds
        self._newest: dict[str, object] = {}
        """By session. Its lease may be asked for anew before the old one has ended."""
        self._num_held = 0

    def __len__(self) -> int:
        return self._num_held

    @contextmanager
    def lend(self, session: str) -> Iterator[None]:
        """A place for a sequence while the context lasts."""
        lease = self._newest[session] = object()
        self._num_held += 1
        self._host.open(session)
        try:
            yield
        finally:
            self._num_held -= 1
            if self._newest.get(session) is lease:
                del self._newest[session]
                self._host.close(session)

    async def until_unused(self, session: str) -> None:
        """Wait until nobody has asked for a sequence for too long."""
        seconds = self._idle_seconds
        while seconds > 0:
            await asyncio.sleep(seconds)
            seconds = self._idle_seconds - self._host.seconds_unused(session)
        self._host.expire(session)
