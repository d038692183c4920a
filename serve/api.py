"""The HTTP interface: routes, streaming, and what goes on the wire. No decoding, no Ray."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response, StreamingResponse

from serve import errors, pages
from serve.answers import Choice, Usage, choices_for
from serve.schemas import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from serve.gateway import Gateway


def build_api(gateway: "Gateway") -> FastAPI:
    """The application of one gateway."""
    api = FastAPI(title="Moray", version="1", docs_url=None, redoc_url=None)
    errors.install(api)
    pages.install(api)

    @api.get("/health")
    async def health() -> Any:
        """Whether answers can be had."""
        await gateway.describe()
        return {"status": "ok"}

    @api.get("/v1/models")
    async def models() -> Any:
        """The one model, and its drafters."""
        description = await gateway.describe()
        model = {"id": gateway.config.model_name, "object": "model", "created": 0, "owned_by": "moray"}
        model |= {"max_model_len": description["capacity"], "drafters": description["drafters"]}
        return {"object": "list", "data": [model]}

    @api.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> Response:
        """Answer a chat."""
        return await _answer(gateway, body)

    @api.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        """Continue a text."""
        return await _answer(gateway, body)

    return api


async def _answer(gateway: "Gateway", body: ChatRequest | CompletionRequest) -> Response:
    capacity = (await gateway.describe())["capacity"]
    choices = choices_for(body, gateway.tokenizer, gateway.config, capacity)
    wording = _Wording(body, gateway.config.model_name)
    events = _events(gateway, choices)
    first = await anext(events)  # what is refused is refused with its status, before a stream begins
    if body.stream:
        return StreamingResponse(_sse(wording, first, events, choices), media_type="text/event-stream")
    async with aclosing(events):
        async for _ in events:
            pass
    return JSONResponse(wording.whole(choices))


async def _events(gateway: "Gateway", choices: list[Choice]) -> AsyncGenerator[tuple[Choice, Any]]:
    """All choices' updates as they come."""
    if len(choices) == 1:
        async with aclosing(gateway.generate(choices[0].request)) as updates:
            async for update in updates:
                yield choices[0], (update, *choices[0].add(update))
        return
    merged: asyncio.Queue[Any] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async with aclosing(gateway.generate(choice.request)) as updates:
                async for update in updates:
                    merged.put_nowait((choice, update))
        except Exception as error:  # noqa: BLE001 - handed to whoever listens
            merged.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in choices]
    try:
        while any(choice.finish_reason is None for choice in choices):
            event = await merged.get()
            if isinstance(event, Exception):
                raise event
            choice, update = event
            yield choice, (update, *choice.add(update))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sse(
    wording: "_Wording", first: tuple[Choice, Any], events: AsyncGenerator[tuple[Choice, Any]], choices: list[Choice]
) -> AsyncIterator[bytes]:
    """Server-sent events: a chunk per update, usage if it was asked for, and the end."""
    try:
        async with aclosing(events):
            for choice in choices:
                for chunk in wording.opening(choice):
                    yield _data(chunk)
            yield _data(wording.chunk(*first))
            async for choice, event in events:
                yield _data(wording.chunk(choice, event))
    except errors.ApiError as error:  # too late for a status
        yield _data(error.body)
        return
    if wording.wants_usage:
        yield _data(wording.usage(choices[0].usage))
    yield b"data: [DONE]\n\n"


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


class _Wording:
    """OpenAI's words for one response."""

    def __init__(self, body: ChatRequest | CompletionRequest, model: str) -> None:
        self._body = body
        self._is_chat = isinstance(body, ChatRequest)
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.wants_usage = body.stream_options is not None and body.stream_options.include_usage

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """A response that is not streamed."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        words = [self._whole_choice(choice) for choice in choices]
        return {**self._common, "object": kind, "choices": words, "usage": choices[0].usage.body}

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return (
            [self._chunk({"index": choice.index, "delta": {"role": "assistant", "content": ""}})]
            if self._is_chat
            else []
        )

    def chunk(self, choice: Choice, event: Any) -> dict[str, Any]:
        """One update of a stream."""
        update, pieces, logprobs = event
        text = "".join(piece.text for piece in pieces)
        words: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        words |= {"delta": {"content": text}} if self._is_chat else {"text": text}
        if update.logprobs is not None:
            words["logprobs"] = self._logprobs(logprobs)
        chunk = self._chunk(words)
        if self._body.speculation.trace:
            chunk["speculation"] = {
                "index": choice.index,
                "pieces": [{"text": piece.text, "drafted": piece.is_drafted} for piece in pieces],
                "rejected": choice.tokenizer.decode(update.rejected),
                "num_tokens": len(update.tokens),
                "num_accepted": update.num_accepted,
                "num_rejected": len(update.rejected),
            }
        return chunk

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that counts."""
        return {**self._chunk(None), "usage": usage.body}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._common, "object": kind, "choices": [] if choice is None else [choice]}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        logprobs = None if choice.request.logprobs is None else self._logprobs(choice.logprobs)
        words = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": logprobs}
        return words | (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
        )

    def _logprobs(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": logprobs, "refusal": None}
        offsets, position = [], 0
        for each in logprobs:
            offsets.append(position)
            position += len(each["token"])
        return {
            "tokens": [each["token"] for each in logprobs],
            "token_logprobs": [each["logprob"] for each in logprobs],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in logprobs],
            "text_offset": offsets,
        }
