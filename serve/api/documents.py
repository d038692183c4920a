"""Response models for the OpenAPI document. Responses are not converted with them; tests check responses against them.

For streams, the events are documented but not the JSON inside them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    """Base class that forbids extra fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class ErrorBody(_Answer):
    """Body of every error."""

    error: ErrorDetails


class Health(_Answer):
    """Body of `/health`."""

    status: Literal["ok"]


class Model(_Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    drafters: list[str]
    synthetic_costs: str = ""
    """Set only if replicas sleep for a scaling experiment, so that speeds mean nothing."""


class ModelList(_Answer):
    """Body of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class PredictionDetails(_Answer):
    """Counts of accepted and rejected draft tokens."""

    accepted_prediction_tokens: int = Field(ge=0)
    rejected_prediction_tokens: int = Field(ge=0)


class UsageBody(_Answer):
    """Token counts of a request; rejected draft tokens do not count as completion tokens."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    completion_tokens_details: PredictionDetails


class TopLogprob(_Answer):
    """One of the most likely tokens."""

    token: str
    """Text of the token with its leading space, or bytes such as `\\xf0` if it is only part of a character."""
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes that the token adds to the text, empty for a special token; joined, they form the text. Null if Moray
    does not support this kind of tokenizer."""


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities under the target, before temperature and filters."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Answer):
    """The same in the format of the completions API."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AnswerMessage(_Answer):
    """A turn of the assistant."""

    role: Literal["assistant"]
    content: str
    refusal: None


class _ChoiceBody(_Answer):
    index: int
    finish_reason: Literal["stop", "length"]


class ChatChoice(_ChoiceBody):
    """One answer to a chat."""

    logprobs: ChatLogprobs | None
    message: AnswerMessage


class CompletionChoice(_ChoiceBody):
    """One continuation of a text."""

    logprobs: CompletionLogprobs | None
    text: str


class _Whole(_Answer):
    id: str
    created: int
    model: str
    usage: UsageBody


class ChatCompletion(_Whole):
    """Body of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Whole):
    """Body of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


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
    429: "All places are taken, or too many requests: `Retry-After` says when to come again",
    500: "The server has failed",
    503: "No target is ready: `Retry-After` says when to come again",
}


def responses(body: type[BaseModel] | None, *statuses: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a FastAPI route: its answer (plain text without a `body`) and its errors."""
    answer: dict[str, Any] = {} if body is None else {"model": body}
    if streams:
        answer["content"] = {"text/event-stream": {"schema": _EVENT}}
    # "4XX" also keeps FastAPI from documenting its own error format.
    others: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody, "description": "Any other refusal"}}
    errors = {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}
    return {200: answer, **errors, **others}
