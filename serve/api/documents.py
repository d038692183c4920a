"""What the HTTP interface answers, for its OpenAPI document. Nothing is converted by these: tests hold answers to them.

Of streams the events are described, but not the JSON that they carry.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    """Holds what it names and nothing else."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(_Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """Field of the request."""
    code: str | None


class ErrorBody(_Answer):
    """Body of every error."""

    error: ErrorDetails


class Health(_Answer):
    """Body of `/health`."""

    status: Literal["ok"]


class Model(_Answer):
    """What is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Most tokens of prompt and answer together."""
    drafters: list[str]
    synthetic_costs: str = ""
    """Only where replicas sleep for a scaling experiment, and speeds mean nothing."""


class ModelList(_Answer):
    """Body of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


class PredictionDetails(_Answer):
    """What became of the drafts."""

    accepted_prediction_tokens: int = Field(ge=0)
    rejected_prediction_tokens: int = Field(ge=0)


class UsageBody(_Answer):
    """Tokens of a request; refused drafts are not among the answer's."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    completion_tokens_details: PredictionDetails


class TopLogprob(_Answer):
    """A token that was likely."""

    token: str
    """Text of the token with its leading space; bytes such as `\\xf0` if it holds a part of a character."""
    logprob: float
    bytes: list[int] | None
    """UTF-8 bytes that the token adds to the text, none for a special token; joined, they are the text. Null if Moray
    does not know the tokenizer's kind."""


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities under the target, before temperature and filters."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(_Answer):
    """The same, as completions word it."""

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
    """A route's answer (without a `body`, text) and errors, as FastAPI takes them."""
    answer: dict[str, Any] = {} if body is None else {"model": body}
    if streams:
        answer["content"] = {"text/event-stream": {"schema": _EVENT}}
    # "4XX" also keeps FastAPI from promising errors of its own.
    others: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody, "description": "Any other refusal"}}
    errors = {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}
    return {200: answer, **errors, **others}
