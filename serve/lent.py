"""Places of a drafter replica that targets hold: a lease for each, and when it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from moray.decoding.remote.host import DraftHost


class LentPlaces:
    """Leases by sequence and by holder; what is not said otherwise runs in one event loop."""

    def __init__(self, host: DraftHost, idle_seconds: float) -> None:
        """
        Args:
            host: where the sequences are drafted.
            idle_seconds: a place that nobody has used for so long is given up.
        """
        self._host = host
        self._idle_seconds = idle_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: dict[str, set[asyncio.Event]] = {}
        """By holder; an event ends its lease."""
        self._newest: dict[str, asyncio.Event] = {}
        """By session. Its lease may be asked for anew before the old one has ended."""

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    @asynccontextmanager
    async def lend(self, session: str, holder: str) -> AsyncIterator[asyncio.Event]:
        """A place for a sequence while the context lasts; yields what is set once it should end."""
        self._loop = asyncio.get_running_loop()
        end = asyncio.Event()
        self._held.setdefault(holder, set()).add(end)
        self._newest[session] = end
        self._host.open(session)
        try:
            yield end
        finally:
            self._held[holder].discard(end)
            if not self._held[holder]:
                del self._held[holder]
            if self._newest[session] is end:
                del self._newest[session]
                self._host.close(session)

    async def until_over(self, session: str, end: asyncio.Event) -> None:
        """Wait until the holder has left, or nobody has asked for the sequence for too long."""
        seconds = self._idle_seconds
        while not end.is_set():
            try:
                await asyncio.wait_for(end.wait(), seconds)
            except TimeoutError:
                seconds = self._idle_seconds - self._host.seconds_unused(session)
                if seconds <= 0:
                    self._host.expire(session)
                    return

    def leave(self, holder: str) -> None:
        """A holder's connections have ended: so do its leases. From any thread.

        If it lives and has already asked for others, those may end as well; it asks once more.
        """
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and all leases with it
                self._loop.call_soon_threadsafe(self._end, holder)

    def _end(self, holder: str) -> None:
        for end in self._held.get(holder, ()):
            end.set()
