"""The main loop of an engine's process: load once, then answer one prompt after another. Standard library only.

Messages in both directions are lines of JSON:

    benchmark -> engine   settings of the engine, once
    engine -> benchmark   {"version": ..., "failures": {row: why}} after loading
    benchmark -> engine   {"row": 0, "prompt": [ids], "max_new_tokens": 80}
    engine -> benchmark   {"tokens": [ids], "seconds": ..., "drafts": ..., "accepted": ...}, or {"error": ...}
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class PeerRow:
    """One way for an engine to decode."""

    drafter: str | None
    """None for plain decoding, `prompt-lookup`, or a folder."""
    depth: int
    """Maximum number of tokens drafted per target pass."""
    adaptive: bool = True
    """Of Moray: whether it chooses how many tokens to draft; otherwise it always drafts `depth`."""


@dataclass(frozen=True)
class Settings:
    """The settings that an engine starts with."""

    model: str
    """Folder of the target; for llama.cpp, its GGUF file."""
    work: str
    """Folder for the engine's conversions of the target; kept between runs."""
    dtype: str
    """float32 or bfloat16."""
    threads: int
    max_length: int
    """Maximum tokens of a prompt and its answer together."""
    eos_ids: list[int]
    """Any of these tokens ends an answer."""
    rows: list[PeerRow]
    template: str | None = None
    """Chat template that the drafters were trained with, as in `target.template`."""


@dataclass(frozen=True)
class Drafted:
    """An answer, with what became of its drafts."""

    tokens: list[int]
    drafts: int | None = None
    """Passes that verified a draft; None if the engine does not say."""
    accepted: int | None = None
    """Draft tokens that those accepted."""


Answer = Callable[[list[int], int], list[int] | Drafted]
"""answer(prompt, max_new_tokens) returns the new tokens of a greedy answer, with counts of drafts if the engine
has them."""

Prepare = Callable[[PeerRow], Answer]
"""prepare(row) returns the function that decodes in that way."""


def answer_from(load: Callable[[Settings], tuple[str, Prepare]]) -> None:
    """Load an engine and answer requests until the input ends; `load` returns its version and its `Prepare` function.

    A row that cannot be prepared is reported to the benchmark; the other rows still work.
    """
    _end_with_parent()
    # Libraries may print: redirect their standard output to standard error, so that it cannot mix with replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values) + "\n")

    given = json.loads(sys.stdin.readline())
    settings = Settings(**given | {"rows": [PeerRow(**row) for row in given["rows"]]})
    answers: dict[int, Answer] = {}
    failures: dict[int, str] = {}
    try:
        version, prepare = load(settings)
        for number, row in enumerate(settings.rows):
            try:
                answers[number] = prepare(row)
            except Exception as error:  # noqa: BLE001 - engines raise all kinds of exceptions
                failures[number] = in_one_line(error)
    except Exception as error:
        reply(error=in_one_line(error))
        raise
    reply(version=version, failures=failures)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            begin = time.perf_counter()
            found = answers[request["row"]](request["prompt"], request["max_new_tokens"])
            seconds = time.perf_counter() - begin
            drafted = found if isinstance(found, Drafted) else Drafted(found)
            reply(tokens=drafted.tokens, seconds=seconds, drafts=drafted.drafts, accepted=drafted.accepted)
        except Exception as error:
            reply(error=in_one_line(error))
            raise


def _end_with_parent() -> None:
    """Have the kernel kill this process when the benchmark dies, even by kill -9 (Linux only).

    Otherwise a process that is stopped by SIGSTOP would stay forever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def in_one_line(error: BaseException) -> str:
    """An error's type and the start of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
