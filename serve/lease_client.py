"""Finds a drafter replica for each sequence: the event loop holds one lease per sequence for the engine's thread."""

import asyncio
import logging
import uuid
from typing import Any

from moray.decoding.remote.channel import Endpoint
from moray.decoding.remote.drafter_pool import DrafterPool
from serve.calls import end_call

_LOGGER = logging.getLogger("ray.serve")
_PAUSE_SECONDS = 0.2
"""Pause before a lost lease is requested again; doubled each time that the same session loses its lease."""
_LONGEST_PAUSE_SECONDS = 10.0


class LeaseClient(DrafterPool):
    """A drafter pool in which Serve's router picks the replica (see `cluster.sticky_router`) and a lease keeps it.

    The interface is called from the engine's thread; everything else runs in the event loop.
    """

    def __init__(self, drafters: Any) -> None:
        """`drafters` is the handle of the drafter deployment."""
        self._drafters = drafters
        self._loop: Any = None
        self._found: dict[str, Endpoint] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, float] = {}
        """Seconds before the next request, by session, for sessions that have lost a lease."""

    def start(self) -> None:
        """Bind to the running event loop, which will hold the leases; must be called before any other method."""
        self._loop = asyncio.get_running_loop()

    def open(self, session: str) -> None:
        self._loop.call_soon_threadsafe(self._begin, session, 0.0)

    def find(self, session: str) -> Endpoint | None:
        return self._found.get(session)

    def lose(self, session: str) -> None:
        self._found.pop(session, None)
        self._loop.call_soon_threadsafe(self._again, session)

    def close(self, session: str) -> None:
        self._found.pop(session, None)
        self._loop.call_soon_threadsafe(self._end, session)

    @property
    def num_leases(self) -> int:
        """Number of leases held or requested."""
        return len(self._tasks)

    def _begin(self, session: str, pause: float) -> None:
        task = self._loop.create_task(self._hold(session, pause))
        self._tasks[session] = task

    def _again(self, session: str) -> None:
        if session in self._tasks:
            self._tasks[session].cancel()
            pause = self._pauses.get(session, _PAUSE_SECONDS)
            self._pauses[session] = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._begin(session, pause)

    def _end(self, session: str) -> None:
        task = self._tasks.pop(session, None)
        if task is not None:
            task.cancel()
        self._found.pop(session, None)
        self._pauses.pop(session, None)

    async def _hold(self, session: str, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            # A new session id per lease, because the router would map the old one to the replica that was just lost.
            # A gRPC call ends with this process, however the process ends.
            drafters = self._drafters.options(stream=True, session_id=uuid.uuid4().hex, _by_reference=False)
            lease = drafters.lease.remote(session)
            try:
                async for endpoint in lease:
                    self._found[session] = endpoint
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever happened to the replica, request another
                _LOGGER.warning("a drafter replica was lost: %s", type(error).__name__)
            finally:
                self._found.pop(session, None)
                end_call(lease)
            # The lease ended without being cancelled: the replica has died, or considers the sequence idle.
            pause = _PAUSE_SECONDS
