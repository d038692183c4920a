"""The chunks of a streamed answer, as OpenAI-compatible servers send them, and what a record takes of them.

Servers leave out what they do not support, so every field may be missing.
"""

import contextlib
import json
from typing import TypedDict, cast

from moray.bench.load.request import RequestRecord
from moray.errors import DataError
from moray.explain import one_line

MAX_ERROR = 300
"""Longest error that is kept, in characters."""


class PredictionDetails(TypedDict, total=False):
    """Draft tokens of an answer."""

    accepted_prediction_tokens: int | None
    rejected_prediction_tokens: int | None


class Usage(TypedDict, total=False):
    """Token counts, of the answer so far or, in the last chunk, of all of it."""

    prompt_tokens: int | None
    completion_tokens: int | None
    completion_tokens_details: PredictionDetails | None


class Delta(TypedDict, total=False):
    """A piece of a chat's answer."""

    content: str | None
    reasoning_content: str | None


class Choice(TypedDict, total=False):
    """A piece of an answer: `delta` of a chat, `text` of a completion."""

    delta: Delta | None
    text: str | None
    finish_reason: str | None


class Speculation(TypedDict, total=False):
    """Moray's own trace of a chunk."""

    num_tokens: int | None


class Chunk(TypedDict, total=False):
    """One event of a stream."""

    usage: Usage | None
    choices: list[Choice] | None
    speculation: Speculation | None


def read_chunk(data: bytes) -> Chunk:
    """Parse the data of an event.

    Raises:
        DataError: it is not a JSON object, or reports an error.
    """
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise DataError(f"a chunk is not a JSON object: {data[:80].decode(errors='replace')}")
    if chunk.get("error"):
        raise DataError(f"in the stream: {error_message(data.decode(errors='replace'))}")
    return cast("Chunk", chunk)


def take_chunk(chunk: Chunk, record: RequestRecord, now: float, texts: list[str], seen: int) -> int:
    """Add a chunk that arrived at `now` to the record, and its text to `texts`.

    Args:
        seen: how many tokens the server had counted before this chunk.

    Returns:
        how many it has counted now.
    """
    usage = chunk.get("usage")
    if usage:
        record.has_usage = True
        record.num_input, record.num_output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        details = usage.get("completion_tokens_details") or PredictionDetails()
        record.num_accepted = details.get("accepted_prediction_tokens")
        record.num_rejected = details.get("rejected_prediction_tokens")
    choices = chunk.get("choices")
    if not choices:
        return seen
    choice = choices[0]
    delta = choice.get("delta") or Delta()
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    record.end = now
    record.finish_reason = choice.get("finish_reason") or record.finish_reason
    trace = chunk.get("speculation") or Speculation()
    counted = trace.get("num_tokens") or (record.num_output - seen if usage else None)
    if text:
        record.times.append(now)
        texts.append(text)
        # The first chunk decides: servers report token counts for every chunk or for none.
        record.sizes_are_tokens = counted is not None if len(record.times) == 1 else record.sizes_are_tokens
        record.sizes.append(counted or 0 if record.sizes_are_tokens else len(text))
    elif record.sizes_are_tokens and counted and record.sizes:
        record.sizes[-1] += counted  # tokens whose text is still held back
    return record.num_output if usage else seen


def error_message(text: str) -> str:
    """The message of an error, in OpenAI's format or any other."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return one_line(text)[:MAX_ERROR]
