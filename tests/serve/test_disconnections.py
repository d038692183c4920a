"""Clients that disconnect: their rows are free within a second."""

import json
import socket
import struct
import time
from contextlib import ExitStack

import pytest
from served_api import MODEL

MAX_SECONDS = 1.0


@pytest.fixture(scope="module")
def slow(serve_target):
    """A server whose answers take seconds."""
    with serve_target(max_waiting=64, max_num_seqs=4) as running:
        step = running.engine.step

        def slow_step():
            time.sleep(0.02)
            return step()

        running.engine.step = slow_step
        yield running


def ask(running, **fields):
    """A connection on which a long answer has been asked for."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 480, "ignore_eos": True, **fields}).encode()
    connection = socket.create_connection(running.address, timeout=20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def reset(connection):
    """Close without a good-bye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("close", [socket.socket.close, reset], ids=["closed", "reset"])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}], ids=str)
def test_a_place_is_freed(slow, fields, close):
    connection = ask(slow, **fields)
    wait_until(lambda: slow.engine.num_running == fields.get("n", 1))
    if "stream" in fields:
        assert connection.recv(100)
    close(connection)
    slow.wait_until_idle(MAX_SECONDS)


def test_places_of_many_are_freed(slow):
    with ExitStack() as stack:
        connections = [stack.enter_context(ask(slow, stream=index % 2 == 0)) for index in range(40)]
        wait_until(lambda: (slow.num_open, slow.engine.num_running) == (40, 4))
        for index, connection in enumerate(connections):
            (reset if index % 3 else socket.socket.close)(connection)
        assert slow.wait_until_idle(MAX_SECONDS) < MAX_SECONDS
    assert slow.client().completions.create(model=MODEL, prompt="x", max_tokens=2).choices


def test_who_goes_at_once_leaves_nothing(slow):
    for index in range(60):
        reset(ask(slow, stream=index % 2 == 0))
    time.sleep(0.2)
    slow.wait_until_idle(MAX_SECONDS)


def test_who_goes_while_asking_leaves_nothing(slow):
    for _ in range(20):
        connection = socket.create_connection(slow.address, timeout=20)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        connection.close()
    slow.wait_until_idle(MAX_SECONDS)


def test_the_others_are_not_disturbed(slow):
    with ask(slow, stream=True) as gone, ask(slow, max_tokens=30, temperature=0) as stays:
        wait_until(lambda: slow.engine.num_running == 2)
        reset(gone)
        body = b""
        while not body.endswith(b"}"):
            body += stays.recv(65536)
    answer = json.loads(body[body.index(b"{") :])
    assert answer["usage"]["completion_tokens"] == 30


def test_a_closed_stream_of_the_official_client_frees_its_place(slow):
    options = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}
    with slow.client().completions.create(model=MODEL, prompt="x", stream=True, **options) as stream:
        next(iter(stream))
        assert slow.engine.num_running == 1
    slow.wait_until_idle(MAX_SECONDS)
