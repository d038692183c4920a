"""How large a request may be: bodies are read to their end, or refused, before anything else looks at them."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError

_MAX_DISCARDED = 8 << 20
"""Bytes of a refused body that are still read: a client that cannot send does not read our refusal either."""
_MAX_DISCARDING = 2.0
"""Seconds."""


class BodyLimit:
    """Middleware that answers 413 to bodies that are too large, whether they say so or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """`max_bytes` is the most that one body may hold."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body = bytearray()
        is_too_large = self._says_too_large(Headers(scope=scope))
        while not is_too_large:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            is_too_large = len(body) > self._max_bytes
            if not message.get("more_body", False):
                break
        if not is_too_large:
            return await self._app(scope, _replay(bytes(body), receive), send)
        del body
        await _discard(receive)
        message = f"the body is larger than {self._max_bytes} bytes, the most that is accepted: shorten it"
        refusal = ApiError(413, message, code="request_too_large").response
        refusal.headers["Connection"] = "close"
        return await refusal(scope, receive, send)

    def _says_too_large(self, headers: Headers) -> bool:
        said = headers.get("content-length", "")
        return said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > self._max_bytes)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` as it was before the body was read."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_MAX_DISCARDING):
            num_read = 0
            while num_read < _MAX_DISCARDED:
                message = await receive()
                num_read += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
