"""What was found out a moment ago, for however many ask: one of them finds out, and the others wait for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Lately(Generic[Found]):
    """A value that is at most some seconds old. That it could not be found out is remembered as long."""

    def __init__(self, find: Callable[[], Awaitable[Found]], fresh_seconds: float, most_seconds: float) -> None:
        """
        Args:
            find: finds it out.
            fresh_seconds: for which it is taken to be so.
            most_seconds: that finding out may take.
        """
        self._find = find
        self._fresh_seconds, self._most_seconds = fresh_seconds, most_seconds
        self._found: asyncio.Future[Found] | None = None
        self._found_at = float("-inf")

    async def get(self) -> Found:
        """
        Raises:
            Exception: what `find` has raised, or TimeoutError.
        """
        found = self._found
        if found is None or (found.done() and time.monotonic() - self._found_at > self._fresh_seconds):
            found = self._found = asyncio.ensure_future(self._look())
        await asyncio.wait((found,))  # it goes on for the others if one of them gives up
        return found.result()

    async def _look(self) -> Found:
        try:
            return await asyncio.wait_for(self._find(), self._most_seconds)
        finally:
            self._found_at = time.monotonic()
