"""Sends requests over HTTP and times the streams of their answers.

The client usually shares its machine with the server, so it does no more per chunk than one `json.loads`. It never
retries, and never logs or writes the API key.
"""

import json
import os
import time
from types import TracebackType
from typing import Any

import aiohttp

from moray.bench.load.chunks import MAX_ERROR, error_message, read_chunk, take_chunk
from moray.bench.load.config import ServeBenchmarkConfig
from moray.bench.load.events import EventReader
from moray.bench.load.request import RequestRecord
from moray.bench.specbench import Question
from moray.config import merge
from moray.errors import ConfigError, DataError, UnreachableError
from moray.explain import one_line

_TOO_MANY = 429


class Client:
    """An endpoint, and the connections to it."""

    def __init__(self, config: ServeBenchmarkConfig) -> None:
        """Create the client; must be called inside an event loop.

        Raises:
            ConfigError: the environment variable of the key is missing or no printable ASCII text.
        """
        self.model = config.model or ""
        self._config = config
        self._path = "/v1/chat/completions" if config.api == "chat" else "/v1/completions"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=config.timeout_s),
            headers=_headers(config.api_key_env),
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def find_model(self) -> None:
        """Query `/v1/models`, and use the first model if the configuration names none.

        Raises:
            UnreachableError: nothing answers at the address.
            ConfigError: the endpoint denies access, or names no model.
        """
        url = f"{self._config.url}/v1/models"
        try:
            async with self._session.get(url) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachableError(
                f"no answer from '{self._config.url}': {_worded(error)}; start the server (serve run "
                "configs/serve/local.yaml) or name another address with --url"
            ) from None
        if status in (401, 403):
            given = self._config.api_key_env
            raise ConfigError(
                f"'{self._config.url}' answers {status}; "
                + (
                    f"the key in {given} is not accepted there"
                    if given
                    else "name the variable of its key: api_key_env"
                )
            )
        if self.model:
            return
        try:
            self.model = json.loads(text)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"'{url}' answers {status} and names no model; name one as model=..., or another address with --url"
            ) from None

    def body(self, question: Question, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        """Build the JSON body of a request."""
        config, prompt = self._config, question.turns[0]
        is_chat = config.api == "chat"
        body: dict[str, Any] = {"model": self.model, "max_tokens": config.max_tokens, "temperature": config.temperature}
        body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if config.temperature > 0:
            body["seed"] = config.seed + index
        if config.stop:
            body["stop"] = list(config.stop)
        if config.ignore_eos:
            body["ignore_eos"] = True
        return merge(body, fields)

    async def ask(self, record: RequestRecord, body: dict[str, Any], began: float) -> None:
        """Send a request and fill in its record; `began` is the clock at the start of the round."""
        record.start = record.end = time.perf_counter() - began
        try:
            async with self._session.post(self._config.url + self._path, json=body) as response:
                if response.status != 200:
                    text = error_message(await response.text())
                    record.outcome = "rejected" if response.status == _TOO_MANY else "failed"
                    record.error = f"{response.status}: {text}"
                else:
                    await _follow(response, record, began)
        except (TimeoutError, aiohttp.ClientError, OSError, DataError) as error:
            record.outcome, record.error = "failed", _worded(error)
        if record.outcome != "ok":
            record.end = time.perf_counter() - began


async def _follow(response: aiohttp.ClientResponse, record: RequestRecord, began: float) -> None:
    reader, texts, is_over, seen = EventReader(), [], False, 0
    async for piece in response.content.iter_any():
        now = time.perf_counter() - began
        for data in reader.feed(piece):
            if data == b"[DONE]":
                is_over = True
                continue
            seen = take_chunk(read_chunk(data), record, now, texts, seen)
    record.text = "".join(texts)
    if not is_over and record.finish_reason is None:
        raise DataError("the stream ended before the answer did")
    if not record.has_usage:
        record.num_output = len(record.times)
    record.outcome = "ok"


def _headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "not in the environment" if not key else "no printable ASCII text"
        raise ConfigError(f"api_key_env is '{variable}', which is {state}; export the key under that name")
    return {"Authorization": f"Bearer {key}"}


def _worded(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no end within timeout_s"
    return one_line(str(error))[:MAX_ERROR] or type(error).__name__
