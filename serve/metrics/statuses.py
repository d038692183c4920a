"""Counts HTTP responses by path and status code."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.metrics import series
from serve.metrics.sink import Sink


class StatusCounter:
    """ASGI middleware that counts responses. All paths without a route count as "other"."""

    def __init__(self, app: ASGIApp, sink: Sink) -> None:
        self._app = app
        self._sink = sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._sink.add(series.ANSWERS, 1, path, str(message["status"]))
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
