"""Every refusal has the right status, names the field, and is the right exception of the official client."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from served_api import MODEL
from starlette.requests import Request

from serve.api.errors import _invalid
from serve.api.schemas import ChatRequest, CompletionRequest

CHAT = [{"role": "user", "content": "one two three"}]


@pytest.fixture
def refuse(client):
    """Ask for what is refused with 400; returns the client's error."""

    def ask(**fields):
        body = {"model": MODEL, "max_tokens": 2, **fields}
        path = "/completions" if "prompt" in fields else "/chat/completions"
        if "prompt" not in fields:
            body.setdefault("messages", CHAT)
        with pytest.raises(openai.BadRequestError) as caught:
            client.post(path, body=body, cast_to=object)
        assert set(caught.value.body) == {"message", "type", "param", "code"}
        assert caught.value.type == "invalid_request_error"
        return caught.value

    return ask


def post(running, content, path="/v1/chat/completions", **headers):
    return httpx.post(running.url + path, content=content, headers={"Content-Type": "application/json", **headers})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("invented", 1),
    ],
)
def test_what_a_chat_does_not_support_is_named(refuse, field, value):
    error = refuse(**{field: value})
    assert (error.code, error.param) == ("unsupported_parameter", field)
    assert field in error.message


@pytest.mark.parametrize(("field", "value"), [("suffix", "end"), ("echo", True), ("best_of", 2)])
def test_what_a_completion_does_not_support_is_named(refuse, field, value):
    error = refuse(prompt="one", **{field: value})
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "hot", "number"),
        ("temperature", 3, "less than or equal to 2"),
        ("temperature", True, "number"),
        ("temperature", 10**400, "number"),
        ("top_p", 0, "greater than 0"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", 1.5, "integer"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 9, "at most 8"),
        ("seed", 1 << 63, "less than"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", [""], "1 to 256"),
        ("stop", "x" * 257, "1 to 256"),
        ("stop", 5, "string"),
        ("stream", "yes", "boolean"),
        ("logit_bias", {"a": 1}, "token ids"),
        ("logit_bias", {"9999": 1}, "9999"),
        ("logit_bias", {"5": 101}, "less than or equal to 100"),
        ("logprobs", 3, "boolean"),
        ("messages", [], "at least 1"),
        ("messages", [{"role": "tool", "content": "x"}], "'system'"),
        ("messages", [{"role": "user", "content": None}], "messages.0.content"),
        ("messages", [{"role": "user", "content": 5}], "messages.0.content: Input should be a valid string; or"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ("speculation", {"drafter": "nobody"}, "none at all"),
        ("prompt", [], "empty"),
        ("prompt", [[]], "no token"),
        ("prompt", [5, 99999], "99999"),
        ("prompt", [5, "a"], "prompt"),
        ("prompt", {"a": 1}, "string"),
    ],
)
def test_bad_values_are_named(refuse, field, value, says):
    error = refuse(**{field: value})
    assert says in error.message
    assert error.param == field


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [0.5] * 1000}, "prompt"),
        (CompletionRequest, {"prompt": [[0.5] * 100] * 100}, "prompt"),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 1000}, "stop"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(token): "x" for token in range(1000)}}, "logit_bias"),
        (CompletionRequest, {"prompt": "x", **{f"invented{number}": 1 for number in range(1000)}}, "invented0"),
        (ChatRequest, {"messages": [1] * 1000}, "messages"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}, "messages"),
    ],
)
def test_of_a_thousand_bad_items_one_is_told(refuse, kind, body, param):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": MODEL, **body})
    assert caught.value.error_count() <= 4, "at most one for each type that a field may have"
    assert refuse(**body).param == param


def test_of_many_problems_few_are_looked_at():
    looked_at = set()

    class Problem(dict):
        def __getitem__(self, key):
            if key != "number":
                looked_at.add(self["number"])
            return super().__getitem__(key)

    problems = [Problem(type="int_type", loc=("body", "prompt", n), msg="x", number=n) for n in range(10_000)]
    error = RequestValidationError(problems, body={"prompt": "x"})
    response = asyncio.run(_invalid(Request({"type": "http"}), error))
    assert response.status_code == 400
    assert 0 < len(looked_at) <= 100


def test_top_logprobs_want_logprobs(refuse):
    assert "top_logprobs" in refuse(top_logprobs=2).message


def test_missing_fields_are_named(client):
    with pytest.raises(openai.BadRequestError, match="messages: Field required"):
        client.post("/chat/completions", body={"model": MODEL}, cast_to=object)
    with pytest.raises(openai.BadRequestError, match="model: Field required"):
        client.post("/chat/completions", body={"model": None, "messages": CHAT}, cast_to=object)


def test_what_does_not_fit_is_too_long(refuse):
    for fields in ({"max_tokens": 5000}, {"messages": [{"role": "user", "content": "x" * 600}]}, {"prompt": [5] * 512}):
        error = refuse(**fields)
        assert error.code == "context_length_exceeded"
        assert "512" in error.message


def test_an_unknown_model_is_not_found(client):
    for ask in (
        lambda: client.chat.completions.create(model="gpt", messages=CHAT),
        lambda: client.completions.create(model="gpt", prompt="x", stream=True),
        lambda: client.models.retrieve("gpt"),
    ):
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; 'tiny' is") as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"model":' * 50_000,
        b"1" * 10_000,
        b'{"model": "tiny", "messages": ' + b"[" * 800 + b"]" * 800 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 800 + b"]" * 800 + b"}",
        b'{"model": "tiny", "tools": ' + b'{"a":' * 800 + b"1" + b"}" * 800 + b"}",
        b'{"model": "tiny", "temperature": NaN, "prompt": "x"}',
        b'{"model": "tiny", "temperature": -Infinity, "prompt": "x"}',
        b'{"model": "tiny", "temperature": 1e999, "prompt": "x"}',
        b'{"model": "tiny", "seed": ' + b"9" * 5000 + b', "prompt": "x"}',
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_hostile_bodies_are_refused(running, body, path):
    response = post(running, body, path)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", "\u2028", "<|end|>", "e\u0301" * 20])
@pytest.mark.parametrize("field", ["messages", "prompt", "stop", "model", "invented", "user", "speculation", "name"])
def test_no_text_makes_the_server_fail(running, text, field):
    body = {"model": MODEL, "max_tokens": 2, "prompt": "x"}
    if field in ("messages", "name"):
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": text if field == "messages" else "x", "name": text}]
    elif field == "speculation":
        body["speculation"] = {"drafter": text}
    elif field == "invented":
        body[text] = 1
    else:
        body[field] = text
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = post(running, json.dumps(body), path)
    assert response.status_code in (200, 400, 404)
    assert response.json()


def test_a_body_of_another_kind_is_told_so(running):
    response = httpx.post(running.url + "/v1/completions", data={"model": MODEL})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1", 404),
        ("GET", "/health/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/models/%00%ff", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("TRACE", "/v1/completions", 405),
    ],
)
def test_other_paths_and_methods_are_refused_in_the_same_shape(running, method, path, status):
    response = httpx.request(method, running.url + path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or response.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/tiny", "/v1/models/x", "/v1/completions"])
def test_head_is_get_without_a_body(running, path):
    with httpx.Client() as client:  # the connection is used again: nothing else was sent on it
        head, get = client.head(running.url + path), client.get(running.url + path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert get.content
    apart = ("date", "server")
    assert {k: v for k, v in head.headers.items() if k not in apart} == {
        k: v for k, v in get.headers.items() if k not in apart
    }


def test_long_prompts_are_tokenised_beside_the_event_loop(running, monkeypatch):
    """So the streams of others go on meanwhile; for short ones a thread would cost more than it saves."""
    tokenizer, threads = running.gateway.tokenizer, []

    def spied(method):
        return lambda *args: threads.append(threading.current_thread()) or method(*args)

    for name in ("encode_prompt", "encode_text"):
        monkeypatch.setattr(tokenizer, name, spied(getattr(tokenizer, name)))
    for text in ("word", "word " * 10_000):
        for path, prompt in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": text}),
        ):
            response = httpx.post(running.url + path, json={"model": MODEL, "max_tokens": 1, **prompt}, timeout=60)
            code = (response.json().get("error") or {}).get("code")
            assert code == (None if text == "word" else "context_length_exceeded")
    assert [thread is running._thread for thread in threads] == [True, True, False, False]


def test_what_asks_for_too_many_answers_is_not_tokenised(running, refuse, monkeypatch):
    texts = []
    monkeypatch.setattr(running.gateway.tokenizer, "encode_text", texts.append)
    monkeypatch.setattr(running.gateway.tokenizer, "encode_prompt", texts.append)
    for body in ({"prompt": ["word"] * 9}, {"prompt": ["word"] * 3, "n": 3}, {"n": 9}):
        error = refuse(**body)
        assert error.param == "n"
        assert "at most 8" in error.message
    assert texts == []


def test_a_strange_host_does_no_harm(running):
    with socket.create_connection(running.address) as connection:
        connection.sendall(b"GET /health/ HTTP/1.1\r\nHost: [::\r\nConnection: close\r\n\r\n")
        assert b" 404 " in connection.makefile("rb").readline()


def test_too_many_requests_are_told_to_come_again(serve_target):
    with serve_target(max_waiting=0, max_num_seqs=1) as running:
        client = running.client()
        options = {"model": MODEL, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        with client.completions.create(prompt="x", stream=True, **options) as stream:
            next(iter(stream))
            for is_streamed in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    client.completions.create(prompt="x", stream=is_streamed, **options)
                assert caught.value.code == "queue_full"
                assert int(caught.value.response.headers["retry-after"]) >= 1
        running.wait_until_idle(1)
        time.sleep(0.2)  # for a moment others are refused unasked
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_without_a_target_nothing_is_ready(serve_target, monkeypatch):
    monkeypatch.setattr("serve.gateway._FRESH", 0.0)
    with serve_target() as running:
        running.targets.is_ready = False
        client = running.client()
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="x")
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.type == "service_unavailable_error"
        assert httpx.get(running.url + "/health").status_code == 503
        running.targets.is_ready = True
        assert httpx.get(running.url + "/health").json() == {"status": "ok"}


def test_health_follows_the_targets(serve_target, monkeypatch):
    def health():
        return httpx.get(running.url + "/health").status_code

    monkeypatch.setattr("serve.gateway._FRESH", 0.0)
    with serve_target() as running:
        assert health() == 200
        running.targets.is_ready = False
        assert health() == 503
        assert running.client().models.list().data, "what the targets can do is known"
        running.targets.is_ready = True
        assert health() == 200


@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 503)])
def test_health_asks_the_targets_at_most_once_a_second(serve_target, monkeypatch, is_ready, status):
    monkeypatch.setattr("serve.gateway._FRESH", 60.0)
    with serve_target() as running:
        running.targets.is_ready = is_ready
        calls, describe = [], running.targets.describe.remote
        monkeypatch.setattr(running.targets.describe, "remote", lambda: calls.append(1) or describe())
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: httpx.get(running.url + "/health").status_code, range(8)))
    assert answers == [status] * 8
    assert len(calls) == 1


def test_a_defect_is_a_500_in_the_same_shape(serve_target):
    with serve_target() as running:
        client = running.client()
        client.models.list()
        running.targets.failure = ValueError("secret")
        for is_streamed in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model=MODEL, prompt="x", stream=is_streamed)
            assert caught.value.status_code == 500
            assert "secret" not in str(caught.value.body)


def test_a_failed_engine_answers_instead_of_hanging(serve_target):
    with serve_target() as running:
        client = running.client()
        client.models.list()

        def fail():
            raise ValueError("broken")

        running.engine.step = fail
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model=MODEL, prompt="x")
        assert running.num_open == 0
        with pytest.raises(RuntimeError, match="has failed"):
            running.replica.check_health()
