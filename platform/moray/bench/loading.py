"""Loads what a measurement needs: the target, its tokenizer, and the questions that it answers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from moray.bench.specbench import Question, read_questions
from moray.errors import DataError
from moray.progress import Progress
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer


class MeasurementConfig(Protocol):
    """The keys that every measurement's configuration has."""

    @property
    def target(self) -> TargetConfig:
        """The target to measure."""
        ...

    @property
    def questions(self) -> str:
        """File of questions."""
        ...

    @property
    def num_questions(self) -> int | None:
        """Number of questions to ask; None for all."""
        ...

    @property
    def threads(self) -> int | None:
        """Number of torch threads; None leaves it to torch."""
        ...


class Loaded(NamedTuple):
    """What every measurement begins with."""

    questions: list[Question]
    tokenizer: ChatTokenizer
    target: Target


def load_target(config: MeasurementConfig, categories: tuple[str, ...] = ()) -> Loaded:
    """Set torch's threads, read the questions, and load the target, with a progress line.

    Args:
        config: of the measurement.
        categories: of the questions to keep; empty for all.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    questions = read_questions(config.questions, config.num_questions, categories)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    with Progress(f"load target {config.target.model}"):
        target = Target.load(config.target)
    return Loaded(questions, tokenizer, target)


def first_prompts(
    questions: Sequence[Question], tokenizer: ChatTokenizer, max_tokens: int, path: str
) -> list[list[int]]:
    """The first turns of the questions as prompts; those of more than `max_tokens` tokens are left out.

    Raises:
        DataError: every prompt is too long; the message names `path`, the file of the questions.
    """
    prompts = [tokenizer.encode_prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    fitting = [prompt for prompt in prompts if len(prompt) <= max_tokens]
    if not fitting:
        raise nothing_fits(path, max_tokens)
    return fitting


def nothing_fits(questions: str, max_model_len: int) -> DataError:
    """The error of a measurement none of whose prompts fits into the context."""
    return DataError(
        f"no prompt of questions '{questions}' fits into the context of {max_model_len} tokens; give shorter ones"
    )
