"""Reads and writes a folder of regenerated chats: parts, a summary of each part's rows, and the plan of the folder.

    run.yaml            provenance of the folder
    plan.yaml           settings that determine the parts; a different plan is refused
    part-00000.jsonl    chats, in UltraChat's schema
    part-00000.yaml     makes the part count; numbers of bad, dropped and cut rows
    summary.yaml        the same over all parts; written once none is missing

Readers of the folder as chats see only the .jsonl files: everything else is YAML.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import yaml

from moray.activations.capture.attempts import ATTEMPTS
from moray.activations.format.records import Record
from moray.activations.format.store import CacheStore
from moray.errors import DataError, MismatchError
from moray.runs_folder import as_runs
from moray.text import Message

AGAIN = "run the same command again: what is finished stays"


class AnsweredChat(TypedDict):
    """One line of a part: a chat in UltraChat's schema."""

    prompt: str
    """First question."""
    prompt_id: str
    """Same as `uid`, for readers that do not know `uid`."""
    messages: list[Message]
    uid: str
    """Unique id of the source row."""
    finish_reasons: list[str]
    """Finish reason of every answer: "eos" or "length"."""


class AnswerSummary(Record):
    """part-NNNNN.yaml: summary of the rows of one part."""

    rows: int
    """Rows read, bad ones included."""
    chats: int
    """Chats kept."""
    bad: int
    bad_rows: list[str]
    """First bad rows, each with its error."""
    dropped: dict[str, int]
    """Dropped chats by reason: too_long (no room for a question and its answer), truncated (an answer was cut off and
    `keep_truncated` is false), empty (no answer with text in it), without_question."""
    shortened: dict[str, int]
    """Chats that ended before their last question, by reason: too_long or truncated."""
    finish_reasons: dict[str, int]
    """Kept answers by finish reason."""
    tokens: int
    """Generated tokens."""


class AnswerStore(CacheStore):
    """Folder of regenerated chats, by URI or path. Picklable."""

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerStore, (self.uri,)

    def begin(self, plan: Mapping[str, object], run_yaml: str) -> None:
        """Start a folder, or resume one with the same plan; delete the half-written files of a killed process.

        Raises:
            MismatchError: the folder has a different plan; names the first differing entry and both values.
        """
        plan = json.loads(json.dumps(plan))
        if self.exists("plan.yaml"):
            present = self.read_yaml("plan.yaml")
            for key in plan:
                if as_runs(present.get(key)) != as_runs(plan[key]):
                    raise MismatchError(
                        f"'{self.uri}' was answered with {key} = {json.dumps(present.get(key))}, now it is "
                        f"{json.dumps(plan[key])}; give another output or remove the folder"
                    )
            self.clear_temporary()
        else:
            self.put("run.yaml", run_yaml)
            self.put("plan.yaml", yaml.safe_dump(plan, sort_keys=False, allow_unicode=True))

    def clear_temporary(self) -> int:
        """Delete the half-written files of a killed process, and attempt counts; return the number of files."""
        found = self.names("", (".tmp", ATTEMPTS))
        for name in found:
            self.filesystem.delete_file(self.path(name))
        return len(found)

    def summaries(self) -> dict[str, AnswerSummary]:
        """Read the summary of every part that counts, by part.

        Raises:
            DataError: a summary is damaged.
        """
        names = [name for name in self.names("", ".yaml") if name.startswith("part-")]
        return {name.removesuffix(".yaml"): self._read_summary(name) for name in names}

    def _read_summary(self, name: str) -> AnswerSummary:
        try:
            return AnswerSummary.of(self.read_yaml(name))
        except ValueError as error:
            raise DataError(f"'{self.uri}/{name}' is damaged: {error}; remove it and {AGAIN}") from None

    def write_part(self, name: str, rows: Sequence[AnsweredChat], summary: AnswerSummary) -> None:
        """Write a part, then its summary, which makes it count."""
        self.put(f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self.put(f"{name}.yaml", yaml.safe_dump(summary.values, sort_keys=False, allow_unicode=True))

    def put(self, name: str, text: str) -> None:
        """Write a file atomically.

        Raises:
            DataError: the file cannot be written, for example because the disk is full.
        """
        try:
            self.write_text(name, text)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise DataError(f"'{self.uri}/{name}' cannot be written: {reason}; fix that and {AGAIN}") from None

    def read_yaml(self, name: str) -> dict[str, object]:
        """Read one of the folder's YAML files.

        Raises:
            DataError: the file is missing or damaged.
        """
        try:
            with self.filesystem.open_input_file(self.path(name)) as source:
                value = yaml.safe_load(source.read())
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"'{self.uri}/{name}' is damaged: {error}; remove it and {AGAIN}") from None
        if not isinstance(value, dict):
            raise DataError(f"'{self.uri}/{name}' is damaged: no mapping; remove it and {AGAIN}")
        return value
