"""The answers of an evaluation on disk: one line per turn asked, so that a killed run can resume.

Lines are in the order of asking, which the configuration determines; the run.yaml next to them identifies the
evaluation. Only whole lines count: a line left half-written by a kill is dropped and its turn is asked again. This
module does not depend on how answers are generated or what is computed from them.
"""

import fcntl
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from moray.bench.configs import EvaluateConfig
from moray.config import Config
from moray.decoding.generation import Generation
from moray.distill.runs import check_run
from moray.errors import ConfigError, DataError, MismatchError
from moray.provenance import RUN_FILE, git_state, read_run_yaml, write_run_yaml

ANSWERS_FILE = "answers.jsonl"
UNKNOWN = "an unknown version"


class MethodAnswer(Config):
    """One method's answer to a turn."""

    method: str
    tree: str
    """Empty for a method without a drafter."""
    generation: Generation


class AnsweredTurn(Config):
    """One line of the file: a turn of a question, asked at one temperature, with the answers of all methods."""

    question_id: str
    turn: int
    temperature: float
    answers: tuple[MethodAnswer, ...]
    program: str = UNKNOWN
    """The version of Moray that answered."""


class AnswerLog:
    """Returns the recorded answers in order, then appends new ones."""

    def __init__(self, path: Path, file: BinaryIO, recorded: Sequence[AnsweredTurn]) -> None:
        self.num_recorded = len(recorded)
        """Turns that were answered before this run."""
        self.path = path
        self._file = file
        self._ahead = deque(recorded)
        self._program = _program()
        self._programs = Counter(line.program for line in recorded)

    def take(
        self, question_id: str, turn: int, temperature: float, methods: Sequence[tuple[str, str]]
    ) -> tuple[MethodAnswer, ...] | None:
        """Return the answers of all methods (name, tree) to the next turn, or None if it has not been asked yet.

        Raises:
            DataError: the next line belongs to another turn, temperature or set of methods.
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
                    f"'{self.path}' goes on with {name} = {there}, but {wanted} is next; remove the file to ask again"
                )
        return line.answers

    def append(self, question_id: str, turn: int, temperature: float, answers: tuple[MethodAnswer, ...]) -> None:
        """Append one line and wait until it is on disk.

        Raises:
            DataError: the file cannot be written.
        """
        line = AnsweredTurn(
            question_id=question_id, turn=turn, temperature=temperature, answers=answers, program=self._program
        )
        try:
            self._file.write(line.model_dump_json().encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(
                f"'{self.path}' cannot be written: {error.strerror}; fix that and run the same command again"
            ) from None
        self._programs[self._program] += 1

    def mixed_programs(self) -> list[str]:
        """A note if several versions of Moray answered, so that speeds mix what each of them achieves."""
        if len(self._programs) < 2:
            return []
        return [f"speeds mix versions: {', '.join(f'{name} ({n} turns)' for name, n in self._programs.items())}"]


@contextmanager
def open_answers(config: EvaluateConfig, fingerprints: Mapping[str, str]) -> Iterator[AnswerLog]:
    """Open the answers of an evaluation, or start with none; creates `config.output` and records whose it is.

    Raises:
        MismatchError: the folder holds another evaluation's answers, or a run of another kind.
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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released whenever and however the process ends
        except OSError:
            raise DataError(f"another evaluation is writing '{path}'; wait for it or give another output") from None
        file.seek(0)
        whole = _whole_lines(file.read())
        if whole:
            _check_owner(folder, config, fingerprints)
        else:
            _check_not_taken(folder)
            write_run_yaml(folder, config, config.sampling.seed, fingerprints)
        recorded = [_read_line(line, f"{path}:{number}") for number, line in enumerate(whole, start=1)]
        file.truncate(sum(map(len, whole)))
        yield AnswerLog(path, file, recorded)


def read_answers(path: Path) -> Iterator[AnsweredTurn]:
    """Read the whole lines of an evaluation's answers, one at a time.

    Raises:
        ConfigError: the file cannot be read.
        DataError: a line is damaged, or the file holds something else.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"}\n") and not file.peek(1):
                    return  # half-written line left by a kill
                yield _read_line(line, f"{path}:{number}", "name the answers.jsonl of an evaluation")
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read: {error.strerror}; name the answers.jsonl that an evaluation wrote"
        ) from None


def _program() -> str:
    state = git_state(Path(__file__))
    if state is None:
        return f"version {metadata.version('moray-platform')}"
    return f"commit {state['sha'][:7]}{' with changes' if state['dirty'] else ''}"


def _check_not_taken(folder: Path) -> None:
    """Refuse a folder whose run.yaml belongs to another kind of run, because overwriting it would break resuming it."""
    if (folder / RUN_FILE).is_file() and "questions" not in read_run_yaml(folder).get("config", {}):
        raise MismatchError(f"output '{folder}' holds a run that is no evaluation; give another folder")


def _whole_lines(content: bytes) -> list[bytes]:
    """Split into lines with their line ends and drop an incomplete last one; a machine crash can leave zeros there."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"}\n"):
        lines.pop()
    return lines


def _check_owner(folder: Path, config: EvaluateConfig, fingerprints: Mapping[str, str]) -> None:
    answers = f"'{folder / ANSWERS_FILE}'"
    if not (folder / RUN_FILE).is_file():
        raise DataError(f"{answers} has no {RUN_FILE} beside it that says what was asked; remove it to ask again")
    check_run(folder, config, fingerprints, in_the_way=answers)


def _read_line(line: bytes, where: str, advice: str = "remove the file to ask again") -> AnsweredTurn:
    try:
        return AnsweredTurn.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the line"
        raise DataError(f"{where}: {place} is damaged ({problem['msg']}); {advice}") from None
