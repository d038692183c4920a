"""The JSON documents that the HTTP API sends: answers, chunks of streamed answers, errors and lists of models.

They are typed dictionaries. The routes send them as they are, pyright checks the code that builds them, and FastAPI
writes the OpenAPI document from them. For streams, that document describes the events but not the JSON inside them.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic does not accept typing.TypedDict before Python 3.12

_exact = with_config(ConfigDict(extra="forbid"))
"""Decorator that documents that a body has no other fields."""

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]


@_exact
class ErrorDetails(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


@_exact
class ErrorBody(TypedDict):
    """Body of every error."""

    error: ErrorDetails


@_exact
class Health(TypedDict):
    """Body of `/health`."""

    status: Literal["ok"]


@_exact
class Sparse(TypedDict):
    """How a sparse target differs from the dense one that it comes from."""

    share: float
    """Mean share of the layers that a token runs through: as measured, or else as it was trained for."""
    agreement: float | None
    """Share of the positions of held-out chats at which the likeliest token is the dense target's; null if that was not
    measured (`pipelines.evaluate sparse`)."""


@_exact
class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    drafters: list[str]
    edge_drafters: NotRequired[list[str]]
    """Drafters that devices may run; set only if there is an endpoint for devices."""
    sparse: NotRequired[Sparse]
    """Set only if each token runs through some of the layers."""
    synthetic_costs: NotRequired[str]
    """Set only if replicas sleep for a scaling experiment, so that speeds mean nothing."""


@_exact
class ModelList(TypedDict):
    """Body of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


@_exact
class EdgeSession(TypedDict):
    """A device's session; private text is not in it, because it never leaves the device."""

    id: str
    drafter: str
    num_tokens: int
    """Verified tokens of the answer."""
    verified: str
    """The end of the verified text."""
    unverified: str
    """What the device has drafted after it."""
    retracted: str
    """What of the draft before was wrong."""
    is_finished: bool


@_exact
class EdgeSessionList(TypedDict):
    """Body of `/v1/edge/sessions`."""

    object: Literal["list"]
    data: list[EdgeSession]


@_exact
class PredictionDetails(TypedDict):
    """Counts of accepted and rejected draft tokens."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


@_exact
class UsageBody(TypedDict):
    """Token counts of a request; rejected draft tokens do not count as completion tokens."""

    prompt_tokens: Annotated[int, Field(ge=1)]
    completion_tokens: Count
    total_tokens: Annotated[int, Field(ge=1)]
    completion_tokens_details: PredictionDetails


@_exact
class TopLogprob(TypedDict):
    """One of the most likely tokens."""

    token: str
    """Text of the token with its leading space, or bytes such as `\\xf0` if it is only part of a character."""
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes that the token adds to the text, empty for a special token; joined, they form the text. Null if Moray
    does not support this kind of tokenizer."""


@_exact
class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


@_exact
class ChatLogprobs(TypedDict):
    """Log-probabilities under the target, before temperature and filters."""

    content: list[TokenLogprob]
    refusal: None


@_exact
class CompletionLogprobs(TypedDict):
    """The same in the format of the completions API."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


@_exact
class AnswerMessage(TypedDict):
    """A turn of the assistant."""

    role: Literal["assistant"]
    content: str
    refusal: None


class _ChoiceBody(TypedDict):
    index: int
    finish_reason: FinishReason


@_exact
class ChatChoice(_ChoiceBody):
    """One answer to a chat."""

    logprobs: ChatLogprobs | None
    message: AnswerMessage


@_exact
class CompletionChoice(_ChoiceBody):
    """One continuation of a text."""

    logprobs: CompletionLogprobs | None
    text: str


class Head(TypedDict):
    """What an answer and all of its chunks begin with."""

    id: str
    created: int
    model: str


class _Whole(Head):
    usage: UsageBody


@_exact
class ChatCompletion(_Whole):
    """Body of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


@_exact
class Completion(_Whole):
    """Body of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@_exact
class TracedPiece(TypedDict):
    """A piece of text, and whether it was drafted."""

    text: str
    drafted: bool


@_exact
class Trace(TypedDict):
    """Moray's own report of one decoding cycle, for requests with `speculation.trace`."""

    index: int
    """The choice that the cycle belongs to."""
    pieces: list[TracedPiece]
    rejected: str
    """Text that rejected draft tokens would have added."""
    num_tokens: int
    num_accepted: int
    num_rejected: int


@_exact
class Delta(TypedDict):
    """Text that a chunk adds to a turn of the assistant."""

    role: NotRequired[Literal["assistant"]]
    content: str


@_exact
class ChatChunkChoice(TypedDict):
    """What a chunk adds to one answer to a chat; only the chunks that open a stream leave the last two fields out."""

    index: int
    delta: Delta
    finish_reason: NotRequired[FinishReason | None]
    logprobs: NotRequired[ChatLogprobs | None]


@_exact
class CompletionChunkChoice(TypedDict):
    """What a chunk adds to one continuation of a text."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None


class _Chunk(Head):
    usage: NotRequired[UsageBody]
    """Only in the last chunk, which has no choice."""
    speculation: NotRequired[Trace]


@_exact
class ChatCompletionChunk(_Chunk):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@_exact
class CompletionChunk(_Chunk):
    """One event of a streamed continuation."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


_EVENT = {
    "type": "object",
    "description": "One event: a chunk in JSON, or [DONE]",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_ERRORS: dict[int, str] = {
    400: "The request cannot be answered; `param` names the field",
    401: "No valid key",
    404: "There is no such model, or nothing at this path",
    405: "The path knows no such method",
    413: "The body is too large",
    429: "The server is at capacity, or this client has sent too many requests: `Retry-After` says when to try again",
    500: "The server has failed",
    503: "No target is ready: `Retry-After` says when to try again",
}


def responses(body: type | None, *statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a FastAPI route: its answer (plain text without a `body`) and its errors."""
    answer: dict[str, Any] = {} if body is None else {"model": body}
    if streams:
        answer["content"] = {"text/event-stream": {"schema": _EVENT}}
    # "4XX" also keeps FastAPI from documenting its own error format.
    others: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody, "description": "Any other refusal"}}
    errors = {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}
    return {200: answer, **errors, **others}
