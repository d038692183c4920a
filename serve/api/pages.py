"""The chat page: a handful of static files, read once at start-up and sent with strict security headers.

Only file names found at start-up are served, so no request can reach another file.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("page")
_START = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # cached but revalidated each time, so that a new release shows at once
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "_File":
        body = path.read_bytes()
        own = {"Content-Type": _TYPES[path.suffix], "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
        return cls(body, {**_HEADERS, **own})

    def response(self, request: Request) -> Response:
        """The file, or 304 if the client has the current version."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")]
        if "*" in known or self.headers["ETag"] in known:
            return Response(status_code=304, headers={k: v for k, v in self.headers.items() if k != "Content-Type"})
        return Response(self.body, headers=self.headers)


def install(api: FastAPI) -> None:
    """Serve the page at `/` and its assets under `/page/`."""
    files = {path.name: _File.read(path) for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    start = files.pop(_START)

    async def index(request: Request) -> Response:
        return start.response(request)

    async def part(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404, "Not Found")
        return file.response(request)

    api.add_route("/", index, include_in_schema=False)
    api.add_route("/page/{name}", part, include_in_schema=False)
