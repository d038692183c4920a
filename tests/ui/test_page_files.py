"""The chat page's files as they are sent: types, caching, policy, and nothing else from the disk."""

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import listening
from fastapi import FastAPI

from moray.targets.spec import TargetConfig
from serve import api
from serve.api.routes import build_api
from serve.config import ServeConfig

FOLDER = Path(api.__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = sorted(path.name for path in FOLDER.iterdir())


def api() -> FastAPI:
    """Of a gateway with a configuration and no replicas: the page needs no more."""
    gateway: Any = SimpleNamespace(config=ServeConfig(target=TargetConfig(model="nobody")))
    return build_api(gateway)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(api()) as port:
        yield port


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request whose path is sent as it stands."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    answer = response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
    connection.close()
    return answer


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_sent_with_its_type_and_the_policy(port, name):
    status, headers, body = ask(port, path_of(name))
    assert status == 200
    assert body == (FOLDER / name).read_bytes()
    assert headers["content-type"].split(";")[0] == TYPES[Path(name).suffix]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "data:" not in policy


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_known_is_not_sent_again(port, name):
    tag = ask(port, path_of(name))[1]["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        status, headers, body = ask(port, path_of(name), **{"If-None-Match": known})
        assert (status, body, headers["etag"]) == (304, b"", tag)
    assert ask(port, path_of(name), **{"If-None-Match": '"other"'})[0] == 200


def test_head_is_answered_without_a_body(port):
    status, headers, body = ask(port, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == (FOLDER / "index.html").stat().st_size


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/../pages.py",
        "/page/%2e%2e/pages.py",
        "/page/..%2fpages.py",
        "/page/..%5cpages.py",
        "/page/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/chat.js%00.svg",
        "/page/index.html",
        "/../pages.py",
    ],
)
def test_nothing_else_can_be_had(port, path):
    assert ask(port, path)[0] == 404


def test_other_methods_are_refused(port):
    assert ask(port, "/", "POST")[0] == 405


def test_the_schema_does_not_list_the_page():
    assert not [path for path in api().openapi()["paths"] if path == "/" or path.startswith("/page")]


def test_the_page_needs_nothing_from_elsewhere():
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]", text), path


def test_no_text_becomes_markup():
    for path in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", path.read_text(encoding="utf-8")
        ), path
