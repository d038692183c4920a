"""The routes and streams of the HTTP API. No decoding and no Ray here."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.websockets import WebSocket

from serve.api import errors, pages
from serve.api.access import Access, Client, read_keys
from serve.api.answers import AnswerUpdate, Choice, check_model, choices_for
from serve.api.documents import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    EdgeSessionList,
    ErrorBody,
    Health,
    Model,
    ModelList,
    responses,
)
from serve.api.errors import JsonResponse
from serve.api.failures import FailureGuard, report
from serve.api.head import HeadAsGet
from serve.api.limits import BodyLimit
from serve.api.listening import ClientGoneError, EventStream, until_client_leaves
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.api.wording import Wording
from serve.metrics.exporters import CONTENT_TYPE

if TYPE_CHECKING:
    from serve.gateway import Gateway
    from serve.target import TargetDescription

_LOGGER = logging.getLogger("ray.serve")
_MAX_CHARACTERS_INLINE = 20_000
"""Maximum characters of a prompt that is tokenised in the event loop, which takes a few milliseconds."""
_Event = tuple[Choice, AnswerUpdate]
_ANSWER_ERRORS = (400, 401, 404, 413, 429, 500, 503)


def build_api(gateway: "Gateway") -> FastAPI:
    """Build the FastAPI application of one gateway.

    Raises:
        ConfigError: the key file is not usable.
    """
    config = gateway.config.api
    keys = read_keys(config.api_keys_file)
    api = FastAPI(title="Moray", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(api)
    api.add_middleware(HeadAsGet)
    api.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, max_seconds=config.max_body_seconds)
    api.add_middleware(Access, keys=keys, requests_per_minute=config.requests_per_minute)
    api.add_middleware(FailureGuard, log_prompts=config.log_prompts)  # the last one added is the outermost
    needs_key = [Security(HTTPBearer(auto_error=False))] if keys else []
    guarded = APIRouter(prefix="/v1", dependencies=needs_key)

    @api.get("/health", responses=responses(Health, 503))
    async def health() -> Any:
        """Report whether a target is ready to answer."""
        await gateway.check()
        return Health(status="ok")

    @api.get(
        "/metrics",
        responses=responses(None, 401, 429, 503),
        response_class=PlainTextResponse,
        dependencies=needs_key,
    )
    async def metrics() -> Response:
        """Metrics of all replicas, in Prometheus format."""
        return Response(await gateway.metrics(), media_type=CONTENT_TYPE)

    @guarded.get("/models", responses=responses(ModelList, 401, 429, 503))
    async def models() -> Any:
        """List the one model and its drafters."""
        return ModelList(object="list", data=[await _model(gateway)])

    @guarded.get("/models/{model:path}", responses=responses(Model, 401, 404, 429, 503))
    async def model(model: str) -> Any:
        """Describe one model."""
        check_model(model, gateway.config)
        return await _model(gateway)

    @guarded.post("/chat/completions", responses=responses(ChatCompletion, *_ANSWER_ERRORS, streams=True))
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a chat."""
        return await _answer(gateway, request, body)

    @guarded.post("/completions", responses=responses(Completion, *_ANSWER_ERRORS, streams=True))
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await _answer(gateway, request, body)

    @guarded.get("/edge/sessions", responses=responses(EdgeSessionList, 401, 429))
    async def edge_sessions(request: Request) -> Any:
        """List the latest sessions of devices with the same key, or without keys from the same address."""
        who = request.scope["moray.client"].who
        return EdgeSessionList(object="list", data=[] if gateway.edge is None else gateway.edge.describe(who))

    if gateway.config.edge is not None:
        api.add_api_websocket_route("/v1/edge", partial(_serve_device, gateway))
    api.include_router(guarded)
    pages.install(api)
    return api


async def _serve_device(gateway: "Gateway", socket: WebSocket) -> None:
    """Verify what a device drafts (see `serve.edge.endpoint`)."""
    try:
        description = await gateway.describe()
        client: Client = socket.scope["moray.client"]
        assert gateway.edge is not None
        await gateway.edge.serve(socket, client.who, description, client.wait)
    except errors.ApiError as error:
        await socket.send_denial_response(error.response)
    except Exception as error:  # noqa: BLE001 - logged without texts, which the server would log
        report(error, gateway.config.api.log_prompts)


async def _model(gateway: "Gateway") -> Model:
    description = await gateway.describe()
    model = Model(
        id=gateway.config.model_name,
        object="model",
        created=0,
        owned_by="moray",
        max_model_len=description.max_model_len,
        drafters=list(description.drafters),
    )
    if gateway.config.edge is not None:
        model["edge_drafters"] = list(gateway.config.edge.drafters)
    if description.sparse is not None:
        model["sparse"] = description.sparse
    synthetic = gateway.config.engine.synthetic
    if synthetic.is_on:
        model["synthetic_costs"] = synthetic.notice
    return model


async def _answer(gateway: "Gateway", request: Request, body: ChatRequest | CompletionRequest) -> Response:
    gateway.refuse_while_full()
    description = await gateway.describe()
    choices = await _choices(gateway, body, description)
    wording = Wording(body, gateway.config.model_name)
    events = _events(gateway, choices)
    try:
        if body.stream:  # wait for the first event, so that a refusal gets its status code instead of a stream
            first = await until_client_leaves(request.receive, anext(events))
            return EventStream(_sse(gateway, wording, first, events, choices), events)
        await until_client_leaves(request.receive, _exhaust(events))
    except ClientGoneError:
        return Response(status_code=499)  # never sent: the client has left
    _log(gateway, choices)
    return JsonResponse(wording.whole(choices))


async def _choices(
    gateway: "Gateway", body: ChatRequest | CompletionRequest, description: "TargetDescription"
) -> list[Choice]:
    """See `choices_for`; long texts are tokenised in a thread, so that other streams are not blocked."""
    limits = description.max_model_len, description.vocab_size
    if body.num_characters <= _MAX_CHARACTERS_INLINE:
        return choices_for(body, gateway.tokenizer, gateway.config, *limits)
    return await asyncio.to_thread(choices_for, body, gateway.tokenizer, gateway.config, *limits)


async def _exhaust(events: AsyncGenerator[_Event]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


def _log(gateway: "Gateway", choices: list[Choice]) -> None:
    if gateway.config.api.log_prompts:
        for choice in choices:
            prompt = gateway.tokenizer.decode(choice.request.prompt, skip_special_tokens=False)
            _LOGGER.info("asked %r, answered %r", prompt, "".join(choice.text))


async def _events(gateway: "Gateway", choices: list[Choice]) -> AsyncGenerator[_Event]:
    """Yield the updates of all choices as they arrive."""
    if len(choices) == 1:
        async with aclosing(gateway.generate(choices[0].request)) as updates:
            async for update in updates:
                yield choices[0], choices[0].add(update)
        return
    merged: asyncio.Queue[Any] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async with aclosing(gateway.generate(choice.request)) as updates:
                async for update in updates:
                    merged.put_nowait((choice, update))
        except Exception as error:  # noqa: BLE001 - re-raised by the consumer below
            merged.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in choices]
    try:
        while any(choice.finish_reason is None for choice in choices):
            event = await merged.get()
            if isinstance(event, Exception):
                raise event
            choice, update = event
            yield choice, choice.add(update)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sse(
    gateway: "Gateway",
    wording: Wording,
    first: _Event,
    events: AsyncGenerator[_Event],
    choices: list[Choice],
) -> AsyncGenerator[bytes]:
    """Yield server-sent events: a chunk per update, usage if requested, and the end marker."""
    try:
        async with aclosing(events):
            for choice in choices:
                for chunk in wording.opening(choice):
                    yield _data(chunk)
            yield _data(wording.chunk(*first))
            async for choice, update in events:
                yield _data(wording.chunk(choice, update))
    except errors.ApiError as error:  # too late for a status code
        yield _data(error.body)
        return
    except Exception as error:  # noqa: BLE001 - logged and reported to the client
        yield _data(report(error, gateway.config.api.log_prompts).body)
        return
    _log(gateway, choices)
    if wording.wants_usage:
        yield _data(wording.usage(choices[0].usage))
    yield b"data: [DONE]\n\n"


def _data(value: ChatCompletionChunk | CompletionChunk | ErrorBody) -> bytes:
    return b"data: " + errors.encode(value) + b"\n\n"
