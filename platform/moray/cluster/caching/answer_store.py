"""The folder of regenerated chats: parts, what became of each part's rows, and whose folder it is.

    run.yaml            where it all comes from
    plan.yaml           what the parts were made with: another plan is refused here
    part-00000.jsonl    chats, in UltraChat's schema
    part-00000.yaml     the part counts; how many rows were bad, dropped, cut
    summary.yaml        the same over all parts: nothing is missing

A reader of the folder as chats sees the .jsonl files alone: all else is YAML.
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
    """A line of a part: a chat in UltraChat's schema."""

    prompt: str
    """The first question."""
    prompt_id: str
    """As `uid`, for readers that know no uid."""
    messages: list[Message]
    uid: str
    """Of the source row."""
    finish_reasons: list[str]
    """Of every answer: "eos" or "length"."""


class AnswerSummary(Record):
    """part-NNNNN.yaml: what became of the rows of one part."""

    rows: int
    """Read, bad ones included."""
    chats: int
    """Kept."""
    bad: int
    bad_rows: list[str]
    """The first of the bad rows, and what is wrong with each."""
    dropped: dict[str, int]
    """Chats by why nothing of them is kept: too_long (no room for a question and its answer), truncated (an answer was
    cut off and `keep_truncated` is false), empty (no answer with text in it), without_question."""
    shortened: dict[str, int]
    """Chats that ended before their last question, by why: too_long or truncated."""
    finish_reasons: dict[str, int]
    """Kept answers by how they ended."""
    tokens: int
    """Generated."""


class AnswerStore(CacheStore):
    """Regenerated chats, by URI or path. Picklable."""

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerStore, (self.uri,)

    def begin(self, plan: Mapping[str, object], run_yaml: str) -> None:
        """Start, or go on with what was started with the same plan; clears what a kill left half-written.

        Raises:
            MismatchError: other answers are here; the first differing entry and both values are named.
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
        """Remove files that a killed process left half-written, and counts of attempts; returns how many."""
        found = self.names("", (".tmp", ATTEMPTS))
        for name in found:
            self.filesystem.delete_file(self.path(name))
        return len(found)

    def summaries(self) -> dict[str, AnswerSummary]:
        """What became of the rows of every part that counts, by part.

        Raises:
            DataError: what is noted of a part is damaged.
        """
        names = [name for name in self.names("", ".yaml") if name.startswith("part-")]
        return {name.removesuffix(".yaml"): self._read_summary(name) for name in names}

    def _read_summary(self, name: str) -> AnswerSummary:
        try:
            return AnswerSummary.of(self.read_yaml(name))
        except ValueError as error:
            raise DataError(f"'{self.uri}/{name}' is damaged: {error}; remove it and {AGAIN}") from None

    def write_part(self, name: str, rows: Sequence[AnsweredChat], summary: AnswerSummary) -> None:
        """Write a part and then make it count."""
        self.put(f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self.put(f"{name}.yaml", yaml.safe_dump(summary.values, sort_keys=False, allow_unicode=True))

    def put(self, name: str, text: str) -> None:
        """Write a file so that it is there whole or not at all.

        Raises:
            DataError: it cannot be written, such as when the disk is full.
        """
        try:
            self.write_text(name, text)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise DataError(f"'{self.uri}/{name}' cannot be written: {reason}; fix that and {AGAIN}") from None

    def read_yaml(self, name: str) -> dict[str, object]:
        """Read one of the YAML files here.

        Raises:
            DataError: it is missing or damaged.
        """
        try:
            with self.filesystem.open_input_file(self.path(name)) as source:
                value = yaml.safe_load(source.read())
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"'{self.uri}/{name}' is damaged: {error}; remove it and {AGAIN}") from None
        if not isinstance(value, dict):
            raise DataError(f"'{self.uri}/{name}' is damaged: no mapping; remove it and {AGAIN}")
        return value
