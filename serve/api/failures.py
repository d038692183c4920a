"""Handles unexpected exceptions: answers 500 in OpenAI's format and logs them without any prompt or answer text.

Exception messages may quote the data that they failed on, so the log holds only their types and stack frames, unless
logging of prompts is enabled.
"""

import logging
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import ApiError

_LOGGER = logging.getLogger("ray.serve")


class FailureGuard:
    """Middleware that catches all exceptions, so that the server cannot log their messages."""

    def __init__(self, app: ASGIApp, log_prompts: bool) -> None:
        self._app = app
        self._log_prompts = log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:  # noqa: BLE001 - last chance to send a response
            refusal = report(error, self._log_prompts)
            if not has_begun:
                await refusal.response(scope, receive, send)


def report(error: Exception, log_prompts: bool) -> ApiError:
    """Log an unexpected exception; returns the error for the client."""
    _LOGGER.error("a request has failed: %s", describe(error, log_prompts))
    return ApiError(500, "the server has failed on this request; its log says where")


def describe(error: BaseException, log_prompts: bool) -> str:
    """The type and stack frames of an error and of its cause; its message only if prompts may be logged."""
    if log_prompts:
        return "".join(traceback.format_exception(error))
    places = "".join(traceback.format_tb(error.__traceback__))
    cause = error.__cause__ or error.__context__
    because = "" if cause is None else f"because of {describe(cause, log_prompts)}"
    return f"{type(error).__name__} at\n{places}{because}"
