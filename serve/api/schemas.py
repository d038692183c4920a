"""Request schemas of the HTTP API, as OpenAI's clients send them.

Unsupported fields that would change the result are refused by name; those that would not are accepted and ignored. A
field that is null counts as left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError

from moray.decoding.request import MAX_TOP_LOGPROBS
from moray.decoding.sampling.stop import MAX_LENGTH, MAX_STRINGS

_IGNORED = frozenset(
    ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
)
"""Fields that are accepted and ignored, because they do not affect the tokens of an answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
}
"""Unsupported fields, with the values that are accepted because they have no effect."""

_OTHER_CONTENTS = {
    "tool_calls": "calls of tools",
    "function_call": "the call of a function",
    "refusal": "a refusal",
    "audio": "speech",
}
"""Fields that a message may have instead of content."""

_STOP_STRING: JsonDict = {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH}
_STOP_SCHEMA: JsonDict = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STRINGS}]}
_BIAS_SCHEMA: JsonDict = {"propertyNames": {"type": "string", "pattern": "^[0-9]{1,10}$"}}
"""JSON schema of fields whose checks are validators with our own error messages."""

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]
"""A list that reports only its first wrong item, because a body may hold hundreds of thousands of them."""


class _Strict(BaseModel):
    """Base class with strict types: values are not converted, for example from text to number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        left = {key: value for key, value in values.items() if value is not None and key not in cls.ignored}
        left = {key: value for key, value in left.items() if not cls._is_neutral(key, value)}
        known = cls.model_fields.keys()
        unknown = [key for key in left if key not in known][:1]  # report only one, since a body may hold any number
        return {key: value for key, value in left.items() if key in known or key in unknown}

    @classmethod
    def _is_neutral(cls, key: str, value: Any) -> bool:
        return any(type(value) is type(neutral) and value == neutral for neutral in cls.neutral.get(key, ()))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Document what `_leave_out` does: fields may be null, and some are accepted and ignored."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        fields, required = schema["properties"], schema.get("required", [])
        for name, field in fields.items():
            if name not in required:
                fields[name] = _or_null(field)
        fields |= {name: {"description": "Taken and left alone"} for name in sorted(cls.ignored)}
        fields |= {name: {"enum": [*values, None]} for name, values in cls.neutral.items()}
        schema["additionalProperties"] = {"type": "null"}
        return reference


class StreamOptions(_Strict):
    """How an answer is streamed."""

    include_usage: bool = False
    """End the stream with a chunk that holds the token counts."""
    include_obfuscation: bool = False
    """Accepted, but has no effect."""


class Speculation(_Strict):
    """Moray's own options: how to draft, and whether to report the outcome of drafts."""

    enabled: bool = True
    """Whether to draft; false decodes plainly."""
    drafter: str | None = Field(default=None, max_length=100)
    """One of the drafters in `/v1/models`; the first if left out."""
    trace: bool = False
    """Report in every chunk of a stream which text was drafted and which drafts were rejected."""


class _Sampled(_Strict):
    """Fields that both kinds of requests share."""

    ignored = _IGNORED
    neutral = _NEUTRAL
    model: str = Field(max_length=200)
    """Name of the model, as in `/v1/models`."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from a token's logit for each time it occurs in the answer."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from a token's logit once it occurs in the answer."""
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)] = Field(
        default_factory=dict, max_length=1024, json_schema_extra=_BIAS_SCHEMA
    )
    """Added to logits, by token id."""
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    """Maximum number of tokens in the answer; null for the server's default."""
    n: int = Field(default=1, ge=1, le=1024)
    """Number of answers."""
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    """Seed of the draws; the same request with the same seed gets the same answer."""
    stop: str | Items[str] = Field(default_factory=list, json_schema_extra=_STOP_SCHEMA)
    """Strings that end the answer and are not part of it."""
    stream: bool = False
    """Send the answer as server-sent events, piece by piece."""
    stream_options: StreamOptions | None = None
    """Options of the stream; used only with `stream`."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the most likely tokens that together have this probability."""
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    """Sample only from this many of the most likely tokens; 0 or -1 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Exclude tokens below this share of the most likely token's probability."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token, up to the maximum number of tokens."""
    speculation: Speculation = Speculation()
    """How to draft for this request."""

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float]) -> dict[str, float]:
        if any(not key.isascii() or not key.isdigit() or len(key) > 10 for key in value):
            raise ValueError('keys must be token ids, such as "42"')
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str]) -> str | list[str]:
        if len(value) > MAX_STRINGS and isinstance(value, list):
            raise ValueError(f"at most {MAX_STRINGS} strings are accepted")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, even if only one was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn of a chat."""

    ignored = frozenset(("annotations",))  # no chat template reads them
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tool_calls": ([],)}
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_contents(cls, values: Any) -> Any:
        """Refuse tool calls, audio and other content that OpenAI's answers may have in place of text."""
        found = [key for key in _OTHER_CONTENTS if isinstance(values, dict) and values.get(key)]
        if found:
            what = _OTHER_CONTENTS[found[0]]
            said = f"{found[0]} holds {what}, but only text is supported here: write it into content as text, "
            raise PydanticCustomError("unsupported", "{said}or leave the turn out", {"said": said})
        return values

    @property
    def text(self) -> str:
        """The whole text of the message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Sampled):
    """Body of `/v1/chat/completions`."""

    messages: Items[ChatMessage] = Field(min_length=1, max_length=4096)
    """The chat; the last turn is the one to answer."""
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    """Like `max_tokens`, and takes precedence over it."""
    logprobs: bool = False
    """Return the log-probability of every token."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Also return this many of the most likely tokens at each position; needs `logprobs`."""

    @property
    def num_characters(self) -> int:
        """Characters of all messages together."""
        return sum(len(message.text) for message in self.messages)

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is set but logprobs is not; set logprobs to true")
        return self


class CompletionRequest(_Sampled):
    """Body of `/v1/completions`."""

    prompt: str | Items[str] | Items[Token] | Items[Items[Token]]
    """Text or token ids to continue; each of several prompts gets its own answer."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Return log-probabilities, with this many of the most likely tokens at each position."""

    @property
    def num_characters(self) -> int:
        """Characters of all text prompts; token ids do not count."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return sum(len(text) for text in texts if isinstance(text, str))


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    apart = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
    kinds = field.pop("anyOf", None) or [field]
    return {"anyOf": [*kinds, *([] if {"type": "null"} in kinds else [{"type": "null"}])], **apart}
