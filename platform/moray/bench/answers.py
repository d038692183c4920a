"""The answers of an evaluation on disk: one line per asked turn, so that a killed run goes on where it was.

Lines stand in the order of asking, which the configuration decides; run.yaml beside them says whose they are. Only
whole lines count: what a kill left half-written is dropped and asked again. This module refuses to know how answers
are made and what is computed from them.
"""

import fcntl
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from moray.bench.configs import EvaluateConfig
from moray.config import Config
from moray.decoding.stats import Generation
from moray.distill.runs import check_run
from moray.errors import ConfigError, DataError, MismatchError
from moray.provenance import RUN_FILE, read_run_yaml, write_run_yaml

ANSWERS_FILE = "answers.jsonl"


class MethodAnswer(Config):
    """What one method did with a turn."""

    method: str
    tree: str
    """Empty for a method without a drafter."""
    generation: Generation


class AnsweredTurn(Config):
    """One line: a turn of a question, asked at one temperature, and what every method did with it."""

    question_id: str
    turn: int
    temperature: float
    answers: tuple[MethodAnswer, ...]


class AnswerLog:
    """Hands out the answers that are there, in their order, then takes new ones."""

    def __init__(self, path: Path, file: BinaryIO, recorded: Sequence[AnsweredTurn]) -> None:
        self.num_recorded = len(recorded)
        """Turns that were answered before this run."""
        self.path = path
        self._file = file
        self._ahead = deque(recorded)

    def take(
        self, question_id: str, turn: int, temperature: float, methods: Sequence[tuple[str, str]]
    ) -> tuple[MethodAnswer, ...] | None:
        """The answers of all methods (name, tree) to the turn that comes next, or None if it was not asked yet.

        Raises:
            DataError: the next line answers something else.
        """
        if not self._ahead:
            return None
        line = self._ahead.popleft()
        found = [(answer.method, answer.tree) for answer in line.answers]
        for name, there, wanted in (
            ("question_id", line.question_id, question_id),
            ("turn", line.turn, turn),
            ("temperature", line.temperature, temperature),
            ("methods", found, list(methods)),
        ):
            if there != wanted:
                raise DataError(
                    f"'{self.path}' goes on with {name} = {there}, but {wanted} is next; remove the file to ask anew"
                )
        return line.answers

    def append(self, question_id: str, turn: int, temperature: float, answers: tuple[MethodAnswer, ...]) -> None:
        """Write one line, and wait until it is on the disk."""
        line = AnsweredTurn(question_id=question_id, turn=turn, temperature=temperature, answers=answers)
        try:
            self._file.write(line.model_dump_json().encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(
                f"'{self.path}' cannot be written: {error.strerror}; mend that and run the same command again"
            ) from None


@contextmanager
def open_answers(config: EvaluateConfig, fingerprints: Mapping[str, str]) -> Iterator[AnswerLog]:
    """Open the answers of an evaluation, or begin with none; `config.output` is made and claimed.

    Raises:
        MismatchError: the folder holds another evaluation's answers; the first differing key is named.
        DataError: the answers are damaged, another process is writing them, or the folder cannot be written.
    """
    folder = Path(config.output)
    path = folder / ANSWERS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise DataError(f"output '{folder}' cannot be written: {error.strerror}; name another folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        except OSError:
            raise DataError(f"another evaluation is writing '{path}'; wait for it or give another output") from None
        file.seek(0)
        whole = _whole_lines(file.read())
        if whole:
            _check_owner(folder, config, fingerprints)
        else:
            _check_unclaimed(folder)
            write_run_yaml(folder, config, config.sampling.seed, fingerprints)
        recorded = [_read_line(line, f"{path}:{number}") for number, line in enumerate(whole, start=1)]
        file.truncate(sum(map(len, whole)))
        yield AnswerLog(path, file, recorded)


def read_answers(path: Path) -> Iterator[AnsweredTurn]:
    """Every whole line of an evaluation's answers, read one by one.

    Raises:
        ConfigError: no such file.
        DataError: a line is damaged, or the file holds something else.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"}\n") and not file.peek(1):
                    return  # what a kill left half-written
                yield _read_line(line, f"{path}:{number}", "name the answers.jsonl of an evaluation")
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read: {error.strerror}; name the answers.jsonl that an evaluation wrote"
        ) from None


def _check_unclaimed(folder: Path) -> None:
    """Refuse a folder whose record belongs to a run of another kind, which could then not go on."""
    if (folder / RUN_FILE).is_file() and "questions" not in read_run_yaml(folder).get("config", {}):
        raise MismatchError(f"output '{folder}' holds a run that is no evaluation; give another folder")


def _whole_lines(content: bytes) -> list[bytes]:
    """Lines with their line ends, without a last one that is not whole: a crash of the machine can leave zeros."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"}\n"):
        lines.pop()
    return lines


def _check_owner(folder: Path, config: EvaluateConfig, fingerprints: Mapping[str, str]) -> None:
    answers = f"'{folder / ANSWERS_FILE}'"
    if not (folder / RUN_FILE).is_file():
        raise DataError(f"{answers} has no {RUN_FILE} beside it that says what was asked; remove it to ask anew")
    check_run(folder, config, fingerprints, in_the_way=answers)


def _read_line(line: bytes, where: str, advice: str = "remove the file to ask anew") -> AnsweredTurn:
    try:
        return AnsweredTurn.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the line"
        raise DataError(f"{where}: {place} is damaged ({problem['msg']}); {advice}") from None
