"""Places for sequences in the drafter pool: one lease each, kept by the event loop for the engine's thread."""

import asyncio
import logging
import uuid
from typing import Any

from moray.decoding.remote.channel import Endpoint
from moray.decoding.remote.drafter_pool import DrafterPool
from serve.calls import end_call

_LOGGER = logging.getLogger("ray.serve")
_PAUSE_SECONDS = 0.2
"""Before a lease that was lost is asked for anew; twice as long each time that the same session has lost it."""
_LONGEST_PAUSE_SECONDS = 10.0


class LeaseClient(DrafterPool):
    """Serve's router chooses the replica (see `cluster.sticky_router`); a lease keeps a session there.

    The interface is called in the engine's thread; all else runs in the event loop.
    """

    def __init__(self, drafters: Any) -> None:
        """`drafters` is the handle of the drafter deployment."""
        self._drafters = drafters
        self._loop: Any = None
        self._found: dict[str, Endpoint] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, float] = {}
        """Of sessions that have lost a lease: seconds before the next is asked for."""

    def start(self) -> None:
        """Called where the event loop runs that keeps the leases, before any is asked for."""
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
        """Leases that are held or asked for."""
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
            # A new name for each lease: by the old one Serve's router would find the replica that was just given up.
            # Over gRPC it ends with this process, however that ends.
            drafters = self._drafters.options(stream=True, session_id=uuid.uuid4().hex, _by_reference=False)
            lease = drafters.lease.remote(session)
            try:
                async for endpoint in lease:
                    self._found[session] = endpoint
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever happened to the replica, another is asked for
                _LOGGER.warning("a drafter replica was lost: %s", type(error).__name__)
            finally:
                self._found.pop(session, None)
                end_call(lease)
            # It has ended by itself: the replica is gone, or takes this process to need it no longer.
            pause = _PAUSE_SECONDS
