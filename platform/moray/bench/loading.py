"""From what a measurement's configuration names to a target and the questions that it answers."""

from collections.abc import Sequence

import torch

from moray.bench.configs import (
    DecodeBenchmarkConfig,
    EngineBenchmarkConfig,
    EvaluateConfig,
    StalenessConfig,
    TreeSearchConfig,
)
from moray.bench.specbench import Question, read_questions
from moray.errors import DataError
from moray.progress import Progress
from moray.targets.model import Target
from moray.text import ChatTokenizer


def load_target(
    config: EvaluateConfig | DecodeBenchmarkConfig | EngineBenchmarkConfig | StalenessConfig | TreeSearchConfig,
    categories: tuple[str, ...] = (),
) -> tuple[list[Question], ChatTokenizer, Target]:
    """What every measurement begins with: torch's threads, the questions, and the target that answers them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    questions = read_questions(config.questions, config.num_questions, categories)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    with Progress(f"load target {config.target.model}"):
        target = Target.load(config.target)
    if target.kernels is not None and target.kernels.reason:
        print(target.kernels.reason)
    return questions, tokenizer, target


def first_prompts(questions: Sequence[Question], tokenizer: ChatTokenizer, room: int, path: str) -> list[list[int]]:
    """The questions' first turns as prompts, without those of more than `room` tokens.

    Raises:
        DataError: none is left, of `path`.
    """
    asked = [tokenizer.encode_prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    prompts = [prompt for prompt in asked if len(prompt) <= room]
    if not prompts:
        raise nothing_fits(path, room)
    return prompts


def nothing_fits(questions: str, capacity: int) -> DataError:
    """The error of a measurement that could not ask a single question."""
    return DataError(
        f"no prompt of questions '{questions}' fits into the context of {capacity} tokens; give shorter ones"
    )
