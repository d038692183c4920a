"""Bearer keys and a rate limit in front of `/metrics` and everything under `/v1`.

Keys are never logged or echoed; internally they are identified by their position in the file.
"""

import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from moray.errors import ConfigError
from serve.api.errors import ApiError
from serve.api.rate_limit import RateLimit

_GUARDED = ("/v1", "/metrics")


@dataclass(frozen=True)
class Client:
    """Who a request comes from; handlers find it in `scope["moray.client"]`."""

    who: int | str
    """The number of its key, or without keys its address."""
    limit: RateLimit | None

    def wait(self) -> float:
        """Count one message of a connection; returns the seconds to wait before it may be handled."""
        return 0.0 if self.limit is None else self.limit.take(self.who)


class Access:
    """Middleware that answers 401 to requests without a valid key, and 429 to clients over the rate limit.

    A WebSocket counts as one request when it is opened; its handler counts its messages.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes], requests_per_minute: int | None) -> None:
        """Without keys, every request is allowed and the limit applies per address. Each gateway replica counts its
        own requests."""
        self._app = app
        self._keys = tuple(keys)
        self._limit = None if requests_per_minute is None else RateLimit(requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and _is_guarded(scope):
            try:
                scope["moray.client"] = Client(self._check(scope), self._limit)
            except ApiError as error:
                response = error.response
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
                if scope["type"] == "websocket":
                    return await WebSocket(scope, receive, send).send_denial_response(response)
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> int | str:
        """Who the client is: the number of its key, or its address."""
        who: int | str = self._key_number(scope) if self._keys else (scope.get("client") or ("",))[0]
        if self._limit is None:
            return who
        seconds = self._limit.take(who)
        if seconds:
            whose = "this key" if self._keys else "this address"
            raise ApiError(
                429,
                f"too many requests of {whose}: wait {math.ceil(seconds)} s",
                code="rate_limit_exceeded",
                retry_after=math.ceil(seconds),
            )
        return who

    def _key_number(self, scope: Scope) -> int:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = given.strip(" \t").encode("latin-1")  # recovers the bytes of the header
        equal = [hmac.compare_digest(key, known) for known in self._keys]  # compares all keys: constant time
        if scheme.lower() != "bearer" or not any(equal):
            message = "no valid key came with the request: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        return equal.index(True)


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Read the keys in a file, one per line; without a file there are none.

    Raises:
        ConfigError: the file cannot be read, holds no key, or has a bad line; the message never shows a key.
    """
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text, or no path"
        raise ConfigError(f"api.api_keys_file is '{path}', which cannot be read: {why}; give a text file") from None
    keys = [line.strip() for line in lines]
    for number, key in enumerate(keys, start=1):
        if any(character.isspace() or not character.isprintable() for character in key):
            raise ConfigError(f"api.api_keys_file is '{path}', whose line {number} holds more than one word: fix it")
    if not any(keys):
        raise ConfigError(
            f"api.api_keys_file is '{path}', which holds no key: write one on each line, or leave the field out to "
            "answer requests without a key"
        )
    return tuple(dict.fromkeys(key.encode() for key in keys if key))


def _is_guarded(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    return any(path == guarded or path.startswith(guarded + "/") for guarded in _GUARDED)
