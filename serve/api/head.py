"""Answers HEAD on every GET route, with the same status and headers and no body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Middleware that handles HEAD as GET and drops the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        asked: Scope = {**scope, "method": "GET"}  # a copy: the server must still see HEAD

        async def send_head(message: Message) -> None:
            if "route" in asked:
                scope["route"] = asked["route"]  # needed by StatusCounter
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        return await self._app(asked, receive, send_head)
