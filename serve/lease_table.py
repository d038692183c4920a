"""The leases that targets hold on a drafter replica, and when they end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from moray.decoding.remote.host import DraftHost


class LeaseTable:
    """The leases by session; used from one event loop only."""

    def __init__(self, host: DraftHost, idle_seconds: float) -> None:
        """
        Args:
            host: drafts the sequences.
            idle_seconds: a lease ends after its sequence has been idle for this long.
        """
        self._host = host
        self._idle_seconds = idle_seconds
        self._newest: dict[str, object] = {}
        """The newest lease by session; a session may request a new lease before its old one has ended."""
        self._num_leases = 0

    def __len__(self) -> int:
        return self._num_leases

    @contextmanager
    def lend(self, session: str) -> Iterator[None]:
        """Hold a lease for a sequence for the duration of the context."""
        lease = self._newest[session] = object()
        self._num_leases += 1
        self._host.open(session)
        try:
            yield
        finally:
            self._num_leases -= 1
            if self._newest.get(session) is lease:
                del self._newest[session]
                self._host.close(session)

    async def until_unused(self, session: str) -> None:
        """Wait until a sequence has been idle for too long, then expire it."""
        seconds = self._idle_seconds
        while seconds > 0:
            await asyncio.sleep(seconds)
            seconds = self._idle_seconds - self._host.seconds_unused(session)
        self._host.expire(session)
