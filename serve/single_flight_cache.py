"""What was found out a moment ago, for however many ask: one of them finds out, and the others wait for it."""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class SingleFlightCache(Generic[Found]):
    """A value that is at most some seconds old. That it could not be found out is remembered as long."""

    def __init__(self, find: Callable[[], Awaitable[Found]], fresh_seconds: float, max_seconds: float) -> None:
        """
        Args:
            find: finds it out.
            fresh_seconds: for which it is taken to be so.
            most_seconds: that finding out may take.
        """
        self._find = find
        self._fresh_seconds, self._max_seconds = fresh_seconds, max_seconds
        self._found: asyncio.Task[Found] | None = None
        self._found_at = float("-inf")

    async def get(self) -> Found:
        """
        Raises:
            Exception: what `find` has raised; TimeoutError where it took too long or was cancelled.
        """
        found = self._found
        if found is None or (found.done() and time.monotonic() - self._found_at > self._fresh_seconds):
            # In a context of its own: Serve would cancel the calls of whoever asked first once that client leaves.
            found = self._found = asyncio.create_task(self._look(), context=contextvars.Context())
            found.add_done_callback(_look_at_error)
        await asyncio.wait((found,))  # it goes on for the others if one of them gives up
        if found.cancelled():
            raise TimeoutError("it was cancelled")
        return found.result()

    async def _look(self) -> Found:
        try:
            return await asyncio.wait_for(self._find(), self._max_seconds)
        finally:
            self._found_at = time.monotonic()


def _look_at_error(found: "asyncio.Task[Found]") -> None:
    """Nobody may be left to be told of it, which asyncio would report as a mistake."""
    if not found.cancelled():
        found.exception()
