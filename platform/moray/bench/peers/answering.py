"""The process of an engine: it loads once, then answers one prompt after another. Standard library only.

Both directions are lines of JSON:

    benchmark -> engine   settings of the engine, once
    engine -> benchmark   {"version": ..., "failures": {row: why}} when it has loaded
    benchmark -> engine   {"row": 0, "prompt": [ids], "max_new_tokens": 80}
    engine -> benchmark   {"tokens": [ids], "seconds": ...}, or {"error": ...}
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
class Row:
    """One way in which an engine is to decode."""

    drafter: str | None
    """None for none, `prompt-lookup`, or a folder."""
    depth: int
    """Most tokens that are drafted before each pass of the target."""


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    model: str
    """Folder of the target; for llama.cpp a GGUF file of it."""
    work: str
    """Folder for what an engine makes of the target, which is kept."""
    dtype: str
    """float32 or bfloat16."""
    threads: int
    max_length: int
    """Most tokens of a prompt and its answer together."""
    eos_ids: list[int]
    """An answer ends with any of them."""
    rows: list[Row]
    template: str | None = None
    """Chat template that drafters were trained with, as `target.template`."""


Answer = Callable[[list[int], int], list[int]]
"""answer(prompt, max_new_tokens): the new tokens of a greedy answer."""

Prepare = Callable[[Row], Answer]
"""prepare(row): how the engine answers in that way."""


def answer_from(load: Callable[[Settings], tuple[str, Prepare]]) -> None:
    """Load an engine by `load`, which returns its version and how rows are prepared, and answer until the input ends.

    A row that cannot be prepared is reported, and the others are answered.
    """
    _end_with_parent()
    # Libraries print as they like: what they write to the standard output goes to the standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values) + "\n")

    given = json.loads(sys.stdin.readline())
    settings = Settings(**given | {"rows": [Row(**row) for row in given["rows"]]})
    answers: dict[int, Answer] = {}
    failures: dict[int, str] = {}
    try:
        version, prepare = load(settings)
        for number, row in enumerate(settings.rows):
            try:
                answers[number] = prepare(row)
            except Exception as error:  # noqa: BLE001 - engines fail in their own ways
                failures[number] = in_one_line(error)
    except Exception as error:
        reply(error=in_one_line(error))
        raise
    reply(version=version, failures=failures)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            begin = time.perf_counter()
            tokens = answers[request["row"]](request["prompt"], request["max_new_tokens"])
            reply(tokens=tokens, seconds=time.perf_counter() - begin)
        except Exception as error:
            reply(error=in_one_line(error))
            raise


def _end_with_parent() -> None:
    """Be killed with the benchmark, also by kill -9: a halted process would stay for ever (Linux alone)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def in_one_line(error: BaseException) -> str:
    """An error's type and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
