"""A log on disk: what a target has written, and what drafters read of it. The target itself is not part of it.

<folder>/log.jsonl          a header, then one continuation per line: prompt and tokens as ids
<folder>/taps.parquet       keys, values and hidden states of every token; a row per continuation
<folder>/head.safetensors   embeddings, norm, lm_head and the last layers of the target
<folder>/target.json        its configuration and sizes
<folder>/...                its tokenizer

A log that was imported without its target has no taps and no head.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from moray.config import Config
from moray.decoding.params import SamplingParams
from moray.errors import ConfigError, DataError
from moray.explain import one_line
from moray.provenance import write_json_atomically
from moray.targets.spec import TargetSpec

LOG_FILE, TAPS_FILE, HEAD_FILE, TARGET_FILE = "log.jsonl", "taps.parquet", "head.safetensors", "target.json"


class LogHeader(Config):
    """The first line of a log."""

    format: Literal[1] = 1
    target: str
    """Fingerprint of the target."""
    text_fingerprint: str
    """Of its tokenizer and chat template."""
    params: SamplingParams
    """How the tokens were drawn."""
    eos_ids: tuple[int, ...]
    """Tokens that end a continuation."""


class Continuation(Config):
    """One line of a log."""

    uid: str
    """Of the question, unique in the log."""
    sequence: int
    """Number of its noise, if tokens were drawn."""
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """What the target has written after the prompt."""
    finish_reason: str
    """"stop" or "length"."""


def read_log(folder: str) -> tuple[LogHeader, list[Continuation]]:
    """The header and all continuations of a log.

    Raises:
        ConfigError: there is no log.
        DataError: a line is damaged or incomplete; it is named by its number.
    """
    path = Path(folder) / LOG_FILE
    if not path.is_file():
        raise ConfigError(f"log '{folder}' has no {LOG_FILE}: make one with `python -m pipelines.replay record`")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if not lines:
        raise DataError(f"'{path}' is empty: record it again")
    header = _parse(LogHeader, lines[0], path, 1)
    found = [_parse(Continuation, line, path, number) for number, line in enumerate(lines[1:], 2)]
    return header, found


def _parse(kind: type[Any], line: str, path: Path, number: int) -> Any:
    try:
        if not line.endswith("\n"):
            raise ValueError("it was cut short")
        return kind.model_validate_json(line)
    except (ValidationError, ValueError) as error:
        raise DataError(f"line {number} of '{path}' is damaged: {one_line(str(error))}; record it again") from None


def whole_lines(path: Path) -> list[str]:
    """The lines of a log that is being written; one that a kill has cut short is dropped from the file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()


def as_line(entry: Config) -> str:
    """One line of the file."""
    return json.dumps(entry.model_dump(mode="json"), separators=(",", ":")) + "\n"


def write_target(
    folder: Path, model_config: Mapping[str, Any] | None, spec: TargetSpec, head_layers: int, dtype: str
) -> None:
    """Write what is known of the target.

    Args:
        folder: folder of the log.
        model_config: the target's config.json; None if only its text is known.
        spec: sizes of the target.
        head_layers: how many of the target's last layers are kept.
        dtype: number format of the head.
    """
    values = {"config": model_config, "spec": spec.model_dump(mode="json"), "head_layers": head_layers, "dtype": dtype}
    write_json_atomically(folder / TARGET_FILE, values)


def count_tokens(entries: Sequence[Continuation]) -> int:
    """Tokens of all continuations, without their prompts."""
    return sum(len(entry.tokens) for entry in entries)
