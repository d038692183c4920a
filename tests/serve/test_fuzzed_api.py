"""Requests made up from the served OpenAPI document, valid ones and spoilt ones: answers are as documented, never 5xx.

What is valid by the document may still be refused, where only the model can say no: a token that it does not know, a
prompt that does not fit.
"""

import copy

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from served_api import MODEL

MODES = {mode.value: mode for mode in schemathesis.GenerationMode}
OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/edge/sessions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
]
EVERY = [(*operation, mode) for operation in OPERATIONS for mode in MODES if mode == "positive" or "POST" in operation]
MAX_SECONDS = 20

load_all_checks()


@pytest.fixture(scope="module")
def document(running):
    """The document that is served."""
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


@pytest.fixture(scope="module")
def session():
    """One connection for all requests."""
    with requests.Session() as session:
        yield session


def tame(case, vocab_size):
    """Make a valid request one that can be answered, and soon: what only the model can know is put right."""

    def known(prompt):
        if isinstance(prompt, list):
            return [known(each) for each in prompt[:3]] or "x"
        return prompt % vocab_size if isinstance(prompt, int) else prompt or "x"

    if not isinstance(case.body, dict):
        return
    body = {**copy.deepcopy(case.body), "model": MODEL, "n": min(case.body.get("n") or 1, 2)}
    limit = "max_completion_tokens" if "messages" in body else "max_tokens"
    body[limit] = min(body.get(limit) or 4, 4)
    body["logit_bias"] = {str(int(key) % vocab_size): value for key, value in (body.get("logit_bias") or {}).items()}
    if isinstance(body.get("speculation"), dict):
        body["speculation"].pop("drafter", None)
    if "prompt" in body:
        body["prompt"] = known(body["prompt"])
    else:
        body["messages"] = body["messages"][:3]
        if body.get("top_logprobs") is not None:
            body["logprobs"] = True
    case.body = body


def fuzz(running, document, session, method, path, mode, num_examples):
    """Send that many requests; returns how often each status came."""
    statuses: dict[int, int] = {}
    excluded = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
    vocab_size = running.replica._tokenizer.vocab_size
    strategy = document[path][method].as_strategy(generation_mode=MODES[mode])

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case):
        if mode == "positive":
            tame(case, vocab_size)
        response = case.call_and_validate(
            base_url=running.url, session=session, excluded_checks=excluded, timeout=MAX_SECONDS
        )
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

    check()
    running.wait_until_idle(2)
    return statuses


def test_every_path_is_documented(document):
    found = [(result.ok().method.upper(), result.ok().path) for result in document.get_all_operations()]
    assert sorted(found) == sorted(OPERATIONS)


@pytest.mark.parametrize(("method", "path", "mode"), EVERY)
def test_some_requests(running, document, session, method, path, mode):
    statuses = fuzz(running, document, session, method, path, mode, 30 if method == "POST" else 5)
    assert mode == "negative" or "{" in path or statuses[200] > sum(statuses.values()) / 2


@pytest.mark.soak
@pytest.mark.parametrize(("method", "path", "mode"), EVERY)
def test_many_requests(running, document, session, method, path, mode):
    fuzz(running, document, session, method, path, mode, 600 if method == "POST" else 100)
