"""Cancels work when its client disconnects. Depends only on ASGI messages.

ASGI signals a disconnect as the next message after the request body, and a handler has to read it itself. Starlette
does so only while it streams.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client has disconnected."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work and cancel it if the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected; the cancelled work has ended by then.
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
    """A stream of server-sent events that ends when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any]) -> None:
        """`source` is the generator behind `events`; it is closed even if the client leaves before the first event."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source):
                await until_client_leaves(receive, self._send_all(send))
        except (ClientGoneError, OSError):  # a server may also raise OSError on send
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
