"""Converts a validated HTTP request to engine requests, and engine updates to OpenAI's choices.

This module handles tokens and text; HTTP is in `serve.api.routes`.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from moray.decoding.params import SamplingParams
from moray.decoding.request import Request, RequestOutput, TokenLogprobs
from moray.decoding.sampling.detokenizer import IncrementalDetokenizer, Piece
from moray.decoding.sampling.stop import StopStrings
from moray.errors import DataError
from moray.text import ChatTokenizer, Message
from serve.api.documents import FinishReason, UsageBody
from serve.api.errors import ApiError
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.config import ServeConfig


@dataclass
class Usage:
    """Token counts of a whole response."""

    num_prompt: int = 0
    num_answer: int = 0
    num_accepted: int = 0
    """Answer tokens that were drafted."""
    num_rejected: int = 0
    """Draft tokens that did not make it into an answer; clients are not billed for them."""

    @property
    def body(self) -> UsageBody:
        """The `usage` object in OpenAI's format."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_answer,
            "total_tokens": self.num_prompt + self.num_answer,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.num_accepted,
                "rejected_prediction_tokens": self.num_rejected,
            },
        }


@dataclass(frozen=True)
class LoggedToken:
    """An answer token with its log-probabilities."""

    token: int
    logprobs: TokenLogprobs
    offset: int
    """Where the token begins in the answer's text, in characters."""


class AnswerUpdate(NamedTuple):
    """What one engine update has added to an answer."""

    output: RequestOutput
    pieces: list[Piece]
    logged: list[LoggedToken]
    """Log-probabilities of the update's tokens; empty if none were asked for."""

    @property
    def text(self) -> str:
        """The text that is now final."""
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Choice:
    """One answer while it is being generated."""

    index: int
    request: Request
    stream: IncrementalDetokenizer
    tokenizer: ChatTokenizer
    usage: Usage
    finish_reason: FinishReason | None = None
    text: list[str] = field(default_factory=list)
    logged: list[LoggedToken] = field(default_factory=list)

    def add(self, update: RequestOutput) -> AnswerUpdate:
        """Add an engine update; returns what it has added to the answer."""
        pieces = self.stream.push(update.tokens, update.num_accepted)
        offsets = self.stream.offsets
        self.usage.num_answer += len(update.tokens)
        self.usage.num_accepted += update.num_accepted
        self.usage.num_rejected += len(update.rejected)
        if update.finish_reason is not None:
            self.finish_reason = cast(FinishReason, update.finish_reason)
            pieces += self.stream.finish()
        self.text += [piece.text for piece in pieces]
        if update.logprobs is None:
            return AnswerUpdate(update, pieces, [])
        logged = [LoggedToken(*each) for each in zip(update.tokens, update.logprobs, offsets, strict=True)]
        self.logged += logged
        return AnswerUpdate(update, pieces, logged)


def choices_for(
    body: ChatRequest | CompletionRequest,
    tokenizer: ChatTokenizer,
    config: ServeConfig,
    max_model_len: int,
    vocab_size: int,
) -> list[Choice]:
    """Create the choices that a request asks for.

    Args:
        body: the request.
        tokenizer: the target's.
        config: configuration of the application.
        max_model_len: maximum tokens of prompt and answer together.
        vocab_size: the target's; its tokenizer may have fewer tokens, or more.

    Raises:
        ApiError: the request asks for something that is not available.
    """
    check_model(body.model, config)
    _check_drafter(body.speculation.drafter, config)
    _check_number(body, config)  # before anything is tokenised
    vocab_size = min(vocab_size, tokenizer.vocab_size)
    prompts = _prompts(body, tokenizer, vocab_size)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    top_k = max(body.top_k, 0)
    params = SamplingParams(temperature=body.temperature, top_k=top_k, top_p=body.top_p, min_p=body.min_p, seed=seed)
    try:
        stop = StopStrings(body.stop_strings, tokenizer.decode)
    except DataError as error:
        raise ApiError(400, str(error), "stop") from None
    bias = {int(token): value for token, value in body.logit_bias.items()}
    if any(token >= vocab_size for token in bias):
        raise ApiError(400, f"logit_bias names token {max(bias)}; the vocabulary has {vocab_size} tokens", "logit_bias")
    usage = Usage(sum(map(len, prompts)))
    continues = isinstance(body, CompletionRequest) or tokenizer.answers_keep_space
    choices: list[Choice] = []
    for prompt in prompts:
        most = _max_tokens(body, len(prompt), config, max_model_len)
        context = prompt if continues else ()
        for _ in range(body.n):
            request = Request(
                prompt=tuple(prompt),
                params=params,
                max_new_tokens=most,
                stop=body.stop_strings,
                continues_prompt=continues,
                ignore_eos=body.ignore_eos,
                sequence=len(choices),  # differs even for equal prompts
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=bias,
                logprobs=_num_logprobs(body),
                drafter=(body.speculation.drafter or "") if body.speculation.enabled else None,
            )
            stream = IncrementalDetokenizer(stop, context, tokenizer.token_bytes.of)
            choices.append(Choice(len(choices), request, stream, tokenizer, usage))
    return choices


def check_model(model: str, config: ServeConfig) -> None:
    """Check that the requested model is the one served.

    Raises:
        ApiError: it is not.
    """
    if model != config.model_name:
        raise ApiError(404, f"model '{model}' is not served here; '{config.model_name}' is", "model", "model_not_found")


def _check_drafter(drafter: str | None, config: ServeConfig) -> None:
    if drafter is not None and drafter not in config.drafters:
        known = ", ".join(config.drafters) or "none at all"
        raise ApiError(400, f"speculation.drafter is '{drafter}'; there are: {known}", "speculation")


def _check_number(body: ChatRequest | CompletionRequest, config: ServeConfig) -> None:
    number = body.n * (1 if isinstance(body, ChatRequest) else len(_separate(body.prompt)))
    if number > config.api.max_choices:
        raise ApiError(400, f"{number} answers are asked for; at most {config.api.max_choices} are made at once", "n")


def _prompts(body: ChatRequest | CompletionRequest, tokenizer: ChatTokenizer, vocab_size: int) -> list[list[int]]:
    try:
        if isinstance(body, ChatRequest):
            messages: list[Message] = [
                {"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in body.messages
            ]
            return [tokenizer.encode_prompt(messages)]
        return [_tokens(prompt, tokenizer, vocab_size) for prompt in _separate(body.prompt)]
    except DataError as error:
        raise ApiError(400, str(error), "messages" if isinstance(body, ChatRequest) else "prompt") from None


def _separate(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give at least one prompt", "prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [each for each in prompt if not isinstance(each, int)]


def _tokens(prompt: str | list[int], tokenizer: ChatTokenizer, vocab_size: int) -> list[int]:
    tokens = tokenizer.encode_text(prompt) if isinstance(prompt, str) else prompt
    if not tokens:
        raise ApiError(400, "prompt holds no token; give some text", "prompt")
    if max(tokens) >= vocab_size:
        raise ApiError(400, f"prompt names token {max(tokens)}; the vocabulary has {vocab_size} tokens", "prompt")
    return tokens


def _max_tokens(body: ChatRequest | CompletionRequest, num_prompt: int, config: ServeConfig, max_model_len: int) -> int:
    asked = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        asked = body.max_completion_tokens
    room = max_model_len - num_prompt
    if room < 1 or (asked is not None and asked > room):
        wanted = "" if asked is None else f" and {asked} of the answer"
        raise ApiError(
            400,
            f"the context holds {max_model_len} tokens; "
            f"{num_prompt} of the prompt{wanted} were asked for: shorten them",
            "messages" if isinstance(body, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
    return min(room, config.api.default_max_tokens) if asked is None else asked


def _num_logprobs(body: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None
