"""Formats answers as OpenAI's JSON: whole responses and the chunks of streamed ones."""

import time
import uuid

from moray.text import ChatTokenizer
from serve.api.answers import AnswerUpdate, Choice, LoggedToken, Usage
from serve.api.documents import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    Head,
    TokenLogprob,
    TopLogprob,
    Trace,
)
from serve.api.schemas import ChatRequest, CompletionRequest

_MIN_LOGPROB = -9999.0
"""The log-probability that OpenAI's schema specifies for very unlikely tokens."""


class Wording:
    """Formats one response as OpenAI's JSON."""

    def __init__(self, body: ChatRequest | CompletionRequest, model: str) -> None:
        self._body = body
        self._is_chat = isinstance(body, ChatRequest)
        self._head: Head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.wants_usage = body.stream_options is not None and body.stream_options.include_usage

    def whole(self, choices: list[Choice]) -> ChatCompletion | Completion:
        """A response that is not streamed."""
        usage = choices[0].usage.body
        if self._is_chat:
            chats = [_chat_choice(choice) for choice in choices]
            return {**self._head, "object": "chat.completion", "choices": chats, "usage": usage}
        texts = [_completion_choice(choice) for choice in choices]
        return {**self._head, "object": "text_completion", "choices": texts, "usage": usage}

    def opening(self, choice: Choice) -> list[ChatCompletionChunk]:
        """The chunks that start a stream."""
        if not self._is_chat:
            return []
        return [self._chat_chunk([{"index": choice.index, "delta": {"role": "assistant", "content": ""}}])]

    def chunk(self, choice: Choice, update: AnswerUpdate) -> ChatCompletionChunk | CompletionChunk:
        """The chunk for one update of a stream."""
        if self._is_chat:
            chunk = self._chat_chunk([_chat_chunk_choice(choice, update)])
        else:
            chunk = self._completion_chunk([_completion_chunk_choice(choice, update)])
        if self._body.speculation.trace:
            chunk["speculation"] = _trace(choice, update)
        return chunk

    def usage(self, usage: Usage) -> ChatCompletionChunk | CompletionChunk:
        """The last chunk of a stream, which holds the usage."""
        chunk = self._chat_chunk([]) if self._is_chat else self._completion_chunk([])
        chunk["usage"] = usage.body
        return chunk

    def _chat_chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _completion_chunk(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        return {**self._head, "object": "text_completion", "choices": choices}


def _chat_choice(choice: Choice) -> ChatChoice:
    assert choice.finish_reason is not None
    return {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "logprobs": None if choice.request.logprobs is None else _chat_logprobs(choice.tokenizer, choice.logged),
        "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
    }


def _completion_choice(choice: Choice) -> CompletionChoice:
    assert choice.finish_reason is not None
    return {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "logprobs": None if choice.request.logprobs is None else _completion_logprobs(choice.tokenizer, choice.logged),
        "text": "".join(choice.text),
    }


def _chat_chunk_choice(choice: Choice, update: AnswerUpdate) -> ChatChunkChoice:
    has_logprobs = update.output.logprobs is not None
    return {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "logprobs": _chat_logprobs(choice.tokenizer, update.logged) if has_logprobs else None,
        "delta": {"content": update.text},
    }


def _completion_chunk_choice(choice: Choice, update: AnswerUpdate) -> CompletionChunkChoice:
    has_logprobs = update.output.logprobs is not None
    return {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "logprobs": _completion_logprobs(choice.tokenizer, update.logged) if has_logprobs else None,
        "text": update.text,
    }


def _trace(choice: Choice, update: AnswerUpdate) -> Trace:
    output = update.output
    return {
        "index": choice.index,
        "pieces": [{"text": piece.text, "drafted": piece.is_drafted} for piece in update.pieces],
        "rejected": _text_behind_others(choice.tokenizer, output.rejected),
        "num_tokens": len(output.tokens),
        "num_accepted": output.num_accepted,
        "num_rejected": len(output.rejected),
    }


def _chat_logprobs(tokenizer: ChatTokenizer, logged: list[LoggedToken]) -> ChatLogprobs:
    return {"content": [_chat_token(tokenizer, each) for each in logged], "refusal": None}


def _completion_logprobs(tokenizer: ChatTokenizer, logged: list[LoggedToken]) -> CompletionLogprobs:
    return {
        "tokens": [_key(tokenizer, each.token) for each in logged],
        "token_logprobs": [max(each.logprobs.token, _MIN_LOGPROB) for each in logged],
        "top_logprobs": [_top_by_key(tokenizer, each) for each in logged],
        "text_offset": [each.offset for each in logged],
    }


def _text_behind_others(tokenizer: ChatTokenizer, tokens: list[int]) -> str:
    """The text that tokens would have added; the leading space may be missing if their bytes are not known."""
    known = [data for data in map(tokenizer.token_bytes.of, tokens) if data is not None]
    return b"".join(known).decode("utf-8", "replace") if len(known) == len(tokens) else tokenizer.decode(tokens)


def _chat_token(tokenizer: ChatTokenizer, logged: LoggedToken) -> TokenLogprob:
    """A token and its alternatives in the format of the chat API."""

    def named(token: int, value: float) -> TopLogprob:
        data = tokenizer.token_bytes.of(token)
        name = token_name(tokenizer, token)
        return {"token": name, "logprob": max(value, _MIN_LOGPROB), "bytes": None if data is None else list(data)}

    top = [named(*each) for each in logged.logprobs.top]
    return {**named(logged.token, logged.logprobs.token), "top_logprobs": top}


def _top_by_key(tokenizer: ChatTokenizer, logged: LoggedToken) -> dict[str, float]:
    """The most likely tokens by text, in the format of the completions API.

    Of several tokens with the same text, the answer's own token keeps the text as its key, otherwise the most likely
    one. The others are keyed by their ids, so that no entry overwrites another.
    """
    owners = {_key(tokenizer, logged.token): logged.token}
    top: dict[str, float] = {}
    for token, value in logged.logprobs.top:
        key = _key(tokenizer, token)
        if owners.setdefault(key, token) != token:
            key = _by_id(token)
        top[key] = max(value, _MIN_LOGPROB)
    return top


def _key(tokenizer: ChatTokenizer, token: int) -> str:
    """A token's key in the completions API, which has no separate field for bytes."""
    name = token_name(tokenizer, token)
    data = tokenizer.token_bytes.of(token)
    return f"bytes:{name}" if data is not None and not _is_text(data) else name


def token_name(tokenizer: ChatTokenizer, token: int) -> str:
    r"""A token's text with its leading space, or its bytes, as in "\xf0\x9f", if it is only part of a character."""
    special = tokenizer.token_bytes.spelling(token)
    if special is not None:
        return special
    data = tokenizer.token_bytes.of(token)
    if data is None:
        return tokenizer.decode([token], skip_special_tokens=False) or _by_id(token)
    if _is_text(data):
        return data.decode("utf-8") or _by_id(token)
    return "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}" for byte in data)


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _by_id(token: int) -> str:
    return f"token_id:{token}"
