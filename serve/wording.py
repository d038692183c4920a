"""OpenAI's words for answers: whole ones, and the chunks of streamed ones."""

import time
import uuid
from typing import Any

from serve.answers import Choice, Usage
from serve.schemas import ChatRequest, CompletionRequest


class Wording:
    """OpenAI's words for one response."""

    def __init__(self, body: ChatRequest | CompletionRequest, model: str) -> None:
        self._body = body
        self._is_chat = isinstance(body, ChatRequest)
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._num_characters: dict[int, int] = {}
        """By choice, those whose log-probabilities have been given."""
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
            words["logprobs"] = self._logprobs(choice.index, logprobs)
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
        logprobs = None if choice.request.logprobs is None else self._logprobs(choice.index, choice.logprobs)
        words = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": logprobs}
        return words | (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
        )

    def _logprobs(self, index: int, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": logprobs, "refusal": None}
        offsets, position = [], self._num_characters.get(index, 0)
        for each in logprobs:
            offsets.append(position)
            position += len(each["token"])
        self._num_characters[index] = position
        return {
            "tokens": [each["token"] for each in logprobs],
            "token_logprobs": [each["logprob"] for each in logprobs],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in logprobs],
            "text_offset": offsets,
        }
