"""Errors of the HTTP interface, in OpenAI's shape: {"error": {message, type, param, code}}."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moray.errors import MorayError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(MorayError):
    """A request that cannot be answered, and what is said about it."""

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
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The whole answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body, self.status, headers)


def install(api: FastAPI) -> None:
    """Let every error of an application be worded so."""
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
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = ApiError(error.status_code, message).response
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    param = path[0] if path else None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}").response
    if first["type"] == "extra_forbidden":
        message = f"{'.'.join(path)} is not supported here: leave it out"
        return ApiError(400, message, param, "unsupported_parameter").response
    where = ".".join(path) or "the body"
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}", param, "invalid_value").response
