"""A cache for one value: one caller refreshes it when it is stale, and concurrent callers wait for the result."""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class SingleFlightCache(Generic[Found]):
    """Caches the result of an asynchronous function for a few seconds; failures are cached just as long."""

    def __init__(self, find: Callable[[], Awaitable[Found]], fresh_seconds: float, max_seconds: float) -> None:
        """
        Args:
            find: computes the value.
            fresh_seconds: how long a result stays valid.
            max_seconds: time limit for `find`.
        """
        self._find = find
        self._fresh_seconds, self._max_seconds = fresh_seconds, max_seconds
        self._found: asyncio.Task[Found] | None = None
        self._found_at = float("-inf")

    async def get(self) -> Found:
        """Return the cached value, computing it if there is none or it is stale.

        Raises:
            Exception: as raised by `find`; TimeoutError if it took too long or was cancelled.
        """
        found = self._found
        if found is None or (found.done() and time.monotonic() - self._found_at > self._fresh_seconds):
            # Run in a separate context: otherwise Serve cancels the calls when the client that came first disconnects.
            found = self._found = asyncio.create_task(self._look(), context=contextvars.Context())
            found.add_done_callback(_look_at_error)
        await asyncio.wait((found,))  # does not cancel the task if this caller gives up
        if found.cancelled():
            raise TimeoutError("it was cancelled")
        return found.result()

    async def _look(self) -> Found:
        try:
            return await asyncio.wait_for(self._find(), self._max_seconds)
        finally:
            self._found_at = time.monotonic()


def _look_at_error(found: "asyncio.Task[Found]") -> None:
    """Retrieve the exception, because asyncio would otherwise log it if no caller is left to receive it."""
    if not found.cancelled():
        found.exception()
