"""Reads benchmark questions from Spec-Bench files, bare prompts and chats.

Figures are comparable with published ones only on the same questions, so files are read in their original formats. This
module does not depend on tokenizers, chat templates or models, and imports neither torch nor ray.
"""

import difflib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moray.errors import ConfigError, DataError

_ACCEPTED = "a row is one JSON object with 'turns' (list of texts), 'messages' (list of {role, content}) or 'prompt'"

_MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
_MT_BENCH_IDS = frozenset(map(str, range(81, 161)))


@dataclass(frozen=True)
class Question:
    """The user's turns of one conversation; the model supplies the answers between them."""

    question_id: str
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """The task under which published tables count it: MT-bench's eight categories of ten form one task there."""
        is_mt_bench = self.category in _MT_BENCH and self.question_id in _MT_BENCH_IDS
        return "mt_bench" if is_mt_bench else self.category


def read_questions(path: str, limit: int | None = None, categories: tuple[str, ...] = ()) -> list[Question]:
    """Read benchmark questions from a file of JSON rows, one per line.

    A file may mix three kinds of rows: Spec-Bench (`question_id`, `category`, `turns`), chats (`messages`, of which
    the user turns count; default category "chat") and bare prompts (`prompt`; default category is the file's stem). A
    row without an id gets "<file stem>:<line>".

    Args:
        path: the file; its suffix does not matter.
        limit: number of questions to take, one per category in turn. Within a category the order is fixed but not the
            file's, because files are often sorted. A smaller limit gives a prefix of a larger one. None takes all, in
            the file's order.
        categories: take only these; empty takes all.

    Raises:
        ConfigError: the limit is below 1.
        DataError: the file is missing or empty, a row cannot be read, or a category is unknown.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1, or null for every question")
    by_category: dict[str, list[tuple[bytes, Question]]] = {}
    everything: list[Question] = []
    for question in _rows(Path(path)):
        chosen = by_category.setdefault(question.category, [])
        if categories and question.category not in categories:
            continue
        if limit is None:
            everything.append(question)
            continue
        chosen.append((_rank(question), question))
        if len(chosen) >= 2 * limit + 1024:  # bounds memory by the limit instead of the file size
            _keep_first(chosen, limit)
    _check_categories(path, categories, known=sorted(by_category))
    if limit is None:
        return everything
    for chosen in by_category.values():
        _keep_first(chosen, limit)
    return _round_robin([[question for _, question in by_category[name]] for name in sorted(by_category)], limit)


def _rank(question: Question) -> bytes:
    return hashlib.sha256(f"{question.category}\n{question.question_id}".encode()).digest()


def _keep_first(ranked: list[tuple[bytes, Question]], count: int) -> None:
    ranked.sort(key=lambda pair: pair[0])  # stable, so rows with the same id keep the file's order
    del ranked[count:]


def _round_robin(groups: list[list[Question]], limit: int) -> list[Question]:
    taken: list[Question] = []
    for turn in range(max((len(group) for group in groups), default=0)):
        for group in groups:
            if turn < len(group):
                taken.append(group[turn])
                if len(taken) == limit:
                    return taken
    return taken


def _check_categories(path: str, wanted: tuple[str, ...], known: list[str]) -> None:
    if not known:
        raise DataError(f"question file '{path}' holds no question; {_ACCEPTED}")
    for name in wanted:
        if name not in known:
            raise DataError(f"category '{name}' is not in '{path}'; it has: {', '.join(known)}")


def _rows(path: Path) -> Iterator[Question]:
    """Yield the questions of a file, read line by line."""
    if not path.is_file():
        raise DataError(_explain_missing(path))
    number = 0
    try:
        # newline="\n", because texts may hold U+2028 and other characters that str.splitlines treats as line ends.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read_row(line, path, number)
    except UnicodeDecodeError:
        raise DataError(f"'{path}' is not UTF-8 text after line {number}; {_ACCEPTED}") from None
    except OSError as error:
        raise DataError(f"question file '{path}' cannot be read: {error.strerror}") from None


def _explain_missing(path: Path) -> str:
    if path.is_dir():
        return f"question file '{path}' is a folder; name one file in it"
    names = sorted(other.name for other in path.parent.iterdir() if other.is_file()) if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    nearest = f"; did you mean '{path.parent / match[0]}'?" if match else ""
    return f"question file '{path}' does not exist{nearest}"


def _read_row(line: str, path: Path, number: int) -> Question:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); {_ACCEPTED}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: the row is a {type(row).__name__}; {_ACCEPTED}")
    if "turns" in row:
        if not isinstance(row["turns"], list):
            raise DataError(f"{where}: 'turns' is {_show(row['turns'])}; a list of texts is needed")
        turns, default_category = row["turns"], "unnamed"
    elif "messages" in row:
        turns, default_category = _user_turns(row["messages"], where), "chat"
    elif "prompt" in row:
        turns, default_category = [row["prompt"]], path.stem
    else:
        raise DataError(f"{where}: the row has only {_show(sorted(row))}; {_ACCEPTED}")
    if not turns:
        raise DataError(f"{where}: the row asks nothing; at least one user turn is needed")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip() or not _is_encodable(turn):
            raise DataError(f"{where}: a turn is {_show(turn)}; a text that is not empty is needed")
    category = row.get("category", default_category)
    if not isinstance(category, str) or not category or not _is_encodable(category):
        raise DataError(f"{where}: 'category' is {_show(category)}; a name is needed")
    return Question(_identify(row, path, number), category, tuple(turns))


def _user_turns(messages: Any, where: str) -> list[Any]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: 'messages' is {_show(messages)}; a list of {{role, content}} is needed")
    return [message.get("content") for message in messages if message.get("role") == "user"]


def _identify(row: dict[str, Any], path: Path, number: int) -> str:
    for key in ("question_id", "prompt_id"):
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int) or not _is_encodable(str(value)):
            raise DataError(f"{path}:{number}: '{key}' is {_show(value)}; a text or a whole number is needed")
        return str(value)
    return f"{path.stem}:{number}"


def _is_encodable(text: str) -> bool:
    """Whether the text has no lone surrogate, which JSON can express but no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
