"""Work that ends when its client goes away. Knows ASGI's messages and nothing else.

Nobody tells a handler that its client has gone: it is the next message behind the request's body. Starlette looks
for it while it streams, and not at all before.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Nobody waits for the answer any longer."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, or as much of it as there is time for.

    Raises:
        ClientGoneError: once the work has been cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return await working
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events that end when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any]) -> None:
        """`source` is what the events are made of: it is closed even if the client has gone before the first."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source):
                await until_client_leaves(receive, self._send_all(send))
        except (ClientGoneError, OSError):  # a server may also refuse to send
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
