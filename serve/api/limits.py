"""Limits on the size and the arrival time of request bodies, which are read completely before any handler runs."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import ApiError

_MAX_DISCARDED = 8 << 20
"""Bytes of a refused body that are still read, because a client that cannot finish sending may not read the refusal."""
_MAX_DISCARDING = 2.0
"""Maximum seconds spent on that."""


class BodyLimit:
    """Middleware that answers 413 if a body is too large, declared or actual, and 408 if it arrives too slowly."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float) -> None:
        """`max_bytes` limits the size of a body, `max_seconds` the time that it may take to arrive."""
        self._app = app
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            if error.status == 413:
                await _discard(receive)
            refusal = error.response
            refusal.headers["Connection"] = "close"
            return await refusal(scope, receive, send)
        if body is not None:
            await self._app(scope, _replay(body, receive), send)
        return None

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Read the whole body; None if the client has disconnected.

        Raises:
            ApiError: the body is too large or takes too long.
        """
        body = bytearray()
        is_too_large, is_whole = self._says_too_large(headers), False
        try:
            async with asyncio.timeout(self._max_seconds):
                while not is_too_large and not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    is_too_large = len(body) > self._max_bytes
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            problem = f"the body has not arrived within {self._max_seconds:g} s: send it faster, or shorten it"
            raise ApiError(408, problem, code="request_timeout") from None
        if is_too_large:
            problem = f"the body is larger than {self._max_bytes} bytes, the most that is accepted: shorten it"
            raise ApiError(413, problem, code="request_too_large")
        return bytes(body)

    def _says_too_large(self, headers: Headers) -> bool:
        said = headers.get("content-length", "")
        return said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > self._max_bytes)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that delivers the body again, as if it had not been read."""
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
