"""Keys and rates: who may ask, how often, and that no key is ever shown."""

import logging

import httpx
import openai
import pytest
from served_api import MODEL

from moray.errors import ConfigError
from serve.api.access import read_keys
from serve.api.rate_limit import RateLimit

KEYS = ("first-secret", "zweiter-schlüssel", "clé-à", "чех")
"""Of those in other letters two end in bytes that are spaces in Latin-1: 0xA0 and 0x85."""


class Clock:
    """Time that tests move."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n".join(("", f"  {KEYS[0]}  ", *KEYS[1:], KEYS[0], "")), encoding="utf-8")
    return str(path)


def test_only_keys_open_the_door(serve_target, keys_file, caplog):
    with serve_target(api_keys_file=keys_file) as running, caplog.at_level(logging.DEBUG):
        assert running.client(KEYS[0]).models.list().data
        for key in KEYS[1:]:
            encoded = f"Bearer  {key}".encode()
            assert httpx.get(running.url + "/v1/models", headers={b"Authorization": encoded}).status_code == 200
        for wrong in ("none", "first-secre", "first-secret2", "FIRST-SECRET", "first-secret second"):
            with pytest.raises(openai.AuthenticationError) as caught:
                running.client(wrong).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["www-authenticate"] == "Bearer"
            assert "secret" not in str(caught.value.body)
        for header in (None, "", "Bearer", f"Basic {KEYS[0]}", KEYS[0]):
            headers = {} if header is None else {"Authorization": header}
            assert httpx.get(running.url + "/v1/models", headers=headers).status_code == 401
        assert httpx.get(running.url + "/v1/nowhere").status_code == 401
        assert httpx.get(running.url + "/metrics").status_code == 401
        assert httpx.get(running.url + "/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).status_code == 200
        assert httpx.get(running.url + "/health").status_code == 200
        assert httpx.get(running.url + "/").status_code != 401
        assert httpx.get(running.url + "/openapi.json").json()["components"]["securitySchemes"]
    assert "secret" not in caplog.text


def test_without_a_key_no_body_is_read(serve_target, keys_file):
    with serve_target(api_keys_file=keys_file) as running:
        response = httpx.post(running.url + "/v1/completions", content=b"{", headers={"Authorization": "Bearer x"})
        assert response.status_code == 401


def test_files_of_keys(keys_file, tmp_path):
    assert read_keys(None) == ()
    assert read_keys(keys_file) == tuple(key.encode() for key in KEYS)


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "no key"), (b" \n\n", "no key"), (b"secret key", "line 1"), (b"\xff\xfe\x00", "UTF-8")]
)
def test_unusable_files_of_keys_are_named(tmp_path, content, says):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"api_keys_file is '{path}'.*{says}") as caught:
        read_keys(str(path))
    assert "secret" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=f"api_keys_file is '{path}', which cannot be read"):
            read_keys(str(path))


def test_a_server_without_its_keys_does_not_start(serve_target):
    with pytest.raises(ConfigError, match="nowhere"), serve_target(api_keys_file="nowhere"):
        pass


def test_rates_are_limited_by_key(serve_target, keys_file):
    with serve_target(api_keys_file=keys_file, requests_per_minute=2) as running:
        client = running.client(KEYS[0])
        for _ in range(2):
            client.models.list()
        with pytest.raises(openai.RateLimitError) as caught:
            client.models.list()
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
        headers = {b"Authorization": f"Bearer {KEYS[1]}".encode()}
        assert httpx.get(running.url + "/v1/models", headers=headers).status_code == 200
        assert httpx.get(running.url + "/health").status_code == 200


def test_rates_are_limited_by_address(serve_target):
    with serve_target(requests_per_minute=1) as running:
        running.client("a").models.list()
        with pytest.raises(openai.RateLimitError):
            running.client("b").models.list()


def test_a_bucket_fills_again():
    clock = Clock()
    limit = RateLimit(6, clock=clock)
    assert [limit.take("a") for _ in range(6)] == [0] * 6
    assert limit.take("a") == pytest.approx(10)
    assert limit.take("b") == 0
    clock.now += 9
    assert limit.take("a") == pytest.approx(1)
    clock.now += 1.001
    assert limit.take("a") == 0
    assert limit.take("a") > 9
    clock.now += 10_000
    assert [limit.take("a") > 0 for _ in range(7)] == [False] * 6 + [True]


def test_buckets_take_bounded_memory():
    clock = Clock()
    limit = RateLimit(60, max_buckets=100, clock=clock)
    for number in range(1000):
        limit.take(number)
    assert limit.num_buckets == 100
    clock.now += 2
    limit.take("late")
    assert limit.num_buckets == 1
