"""Bodies that are too large, and what is written into logs."""

import json
import logging
import socket

import httpx
import openai
import pytest
from served_api import MODEL

SECRET = "xyzzy plugh"
LIMIT = 4096


@pytest.fixture(scope="module")
def small(serve_target):
    with serve_target(max_body_bytes=LIMIT) as running:
        yield running


def check_refusal(response):
    assert response.status_code == 413
    error = response.json()["error"]
    assert str(LIMIT) in error["message"]
    assert error["code"] == "request_too_large"


def test_the_official_client_is_told(small):
    with pytest.raises(openai.APIStatusError) as caught:
        small.client().completions.create(model=MODEL, prompt="x" * (3 << 20))
    assert caught.value.status_code == 413


def test_a_body_may_be_as_large_as_the_limit(small):
    def post(length):
        start = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "user": ""})[:-2]
        content = start + "x" * (length - len(start) - 2) + '"}'
        headers = {"Content-Type": "application/json"}
        return httpx.post(small.url + "/v1/completions", content=content, headers=headers)

    assert post(LIMIT).status_code == 200
    check_refusal(post(LIMIT + 1))


def test_chunked_bodies_are_counted(small):
    for num_chunks in (10, 3000):
        chunks = (b"x" * 1000 for _ in range(num_chunks))
        check_refusal(httpx.post(small.url + "/v1/completions", content=chunks))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere"])
def test_every_path_has_the_limit(small, path):
    check_refusal(httpx.request("POST", small.url + path, content=b"x" * 5000))


def test_a_body_that_never_comes_is_not_waited_for_long(small):
    with socket.create_connection(small.address, timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999999999999\r\n\r\n"
        connection.sendall(head.encode())
        line = connection.makefile("rb").readline()
        assert b" 413 " in line or b" 400 " in line  # a server may refuse such a number by itself
    with socket.create_connection(small.address, timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\nsome")
        assert b" 413 " in connection.makefile("rb").readline()


def test_a_body_that_never_ends_is_not_waited_for_long(serve_target):
    with serve_target(max_body_seconds=0.5) as running:
        for start in (b"Content-Length: 999\r\n\r\nsome", b"Transfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n"):
            with socket.create_connection(running.address, timeout=10) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + start)
                head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
            assert b" 408 " in head.splitlines()[0]
            assert json.loads(body)["error"]["code"] == "request_timeout"
        assert running.client().completions.create(model=MODEL, prompt="x", max_tokens=40).choices, (
            "answers may take longer"
        )


def ask_in_every_way(running):
    """Whole and streamed, answered and refused, and with a defect whose error quotes the prompt."""
    client = running.client()
    answers = [client.completions.create(model=MODEL, prompt=SECRET, max_tokens=12, temperature=0).choices[0].text]
    list(client.completions.create(model=MODEL, prompt=SECRET, max_tokens=12, temperature=0, stream=True))
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": SECRET}], max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=SECRET, stop=SECRET, max_tokens=9999)
    running.targets.failure = ValueError(f"cannot read {SECRET!r}")
    for is_streamed in (False, True):
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=MODEL, prompt=SECRET, stream=is_streamed, n=2)
    return answers


@pytest.fixture
def logged():
    """What the interface writes into its log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_neither_prompts_nor_answers_are_logged(serve_target, logged, capfd, caplog):
    with serve_target() as running, caplog.at_level(logging.DEBUG):
        (answer,) = ask_in_every_way(running)
    output = capfd.readouterr()
    everything = "\n".join([*logged, caplog.text, output.out, output.err])
    assert sum("a request has failed" in line for line in logged) == 2
    assert "xyzzy" not in everything
    assert answer not in everything


def test_prompts_are_logged_where_that_is_wished(serve_target, logged):
    with serve_target(log_prompts=True) as running:
        (answer,) = ask_in_every_way(running)
    asked = [line for line in logged if line.startswith("asked")]
    assert len(asked) == 3
    assert all(SECRET in line for line in asked)
    assert repr(answer) in asked[0]
    assert asked[0] == asked[1]
    failed = [line for line in logged if "has failed" in line]
    assert len(failed) == 2
    assert all("cannot read" in line or SECRET in line for line in failed)
