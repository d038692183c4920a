"""Errors of the HTTP API in OpenAI's format: {"error": {message, type, param, code}}."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from moray.errors import MorayError
from serve.api.documents import ErrorBody

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_MAX_PROBLEMS = 100
"""Maximum number of validation errors examined per body; `serve.api.schemas` keeps their number low."""
_BREAKS = str.maketrans({code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)})
"""Characters that some event stream parsers treat as line ends, against the standard."""


def encode(value: Any) -> bytes:
    """Encode as JSON on one line; characters that UTF-8 cannot represent become "?"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(_BREAKS).encode("utf-8", "replace")


class JsonResponse(Response):
    """A JSON response that can always be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See `encode`."""
        return encode(content)


class ApiError(MorayError):
    """A request that cannot be answered, with the error that the client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> ErrorBody:
        """The error in OpenAI's format."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JsonResponse(self.body, self.status, headers)


def install(api: FastAPI) -> None:
    """Make an application report all errors in this format."""
    handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _problem,
        RequestValidationError: _invalid,
        HTTPException: _http,
    }
    for kind, handler in handlers.items():
        api.add_exception_handler(kind, handler)


async def _problem(request: Request, error: ApiError) -> Response:
    return error.response


async def _http(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}: {request.method} {request.scope['path']}"
    response = ApiError(error.status_code, message).response
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    found = error.errors()[:_MAX_PROBLEMS]
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}").response
    if first["loc"] == ("body",) and isinstance(error.body, bytes):
        return ApiError(400, "the body is not JSON: send it with Content-Type: application/json").response
    # A field may allow several types: report the errors with the deepest path, those of the closest type.
    located = [(_path(error.body, each), each) for each in found if each["loc"][:2] == first["loc"][:2]]
    path = max((path for path, _ in located), key=len)
    same = [each for other, each in located if other == path]
    where, param = ".".join(path) or "the body", path[0] if path else None
    if all(each["type"] == "extra_forbidden" for each in same):
        return ApiError(400, f"{where} is not supported here: leave it out", param, "unsupported_parameter").response
    message = "; or ".join(dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in same))
    code = "unsupported_parameter" if same[0]["type"] == "unsupported" else "invalid_value"
    return ApiError(400, f"{where}: {message}", param, code).response


def _path(body: Any, problem: Any) -> tuple[str, ...]:
    """The path of a problem within the body: pydantic's location without the names of union members."""
    parts: list[str] = []
    location = problem["loc"][1:]
    for depth, part in enumerate(location, start=1):
        is_missing = problem["type"] == "missing" and depth == len(location)
        try:
            body = body[part]
        except (KeyError, IndexError, TypeError):
            if not is_missing:
                continue
        parts.append(str(part))
    return tuple(parts)
