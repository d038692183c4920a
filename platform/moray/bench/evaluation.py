"""One evaluation from configuration to report: load, ask, summarise."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from moray.bench.configs import EvaluateConfig
from moray.bench.runner import Runner
from moray.bench.specbench import read_questions
from moray.bench.summary import summarise
from moray.distill.checkpoint import load_drafter, read_drafter_config
from moray.distill.metrics import read_metrics
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.provenance import machine, versions
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.text import ChatTokenizer


def evaluate(config: EvaluateConfig, console: Console) -> dict[str, Any]:
    """Run an evaluation and return its report (see `bench.report_schema`).

    Raises:
        DataError: not one prompt fits into the target's context.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    questions = read_questions(config.questions, config.num_questions, config.categories)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    target = Target.load(config.target)
    drafters = load_drafters(config.drafters, target, tokenizer)
    runner = Runner(target, drafters, tokenizer, config)
    total = sum(len(question.turns) for question in questions)
    for _ in track(runner.ask(questions), description="evaluate", total=total, console=console):
        pass
    if not runner.measurement.asked:
        raise DataError(
            f"no prompt of questions '{config.questions}' fits into the context of {target.spec.max_positions} tokens "
            "that the target has; give shorter ones"
        )
    figures = summarise(runner.measurement, config.sampling, config.target.dtype)
    training = {name: _series(Path(folder)) for name, folder in zip(drafters, config.drafters, strict=True)}
    return figures | {
        "training": {name: series for name, series in training.items() if series},
        "machine": machine(),
        "settings": config.model_dump(mode="json") | {"versions": versions()},
    }


def load_drafters(folders: tuple[str, ...], target: Target, tokenizer: ChatTokenizer) -> dict[str, Drafter]:
    """Load trained drafters for one target, by the names of their folders.

    Raises:
        ConfigError: two folders have the same name.
        MismatchError: a drafter belongs to another target, tokenizer or template.
    """
    drafters: dict[str, Drafter] = {}
    for folder in folders:
        name = Path(folder).name
        if name in drafters:
            raise ConfigError(f"drafters holds two folders called '{name}'; rename one, it is the row's name")
        num_layers = read_drafter_config(Path(folder))[0].num_target_layers
        drafters[name] = load_drafter(Path(folder), TargetHead.of(target, num_layers), tokenizer.fingerprint)
    return drafters


def _series(folder: Path) -> dict[str, list[float | None]]:
    """Training curves of a drafter, column by column."""
    rows = read_metrics(folder)
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})] if rows else []
    return {name: [row.get(name) for row in rows] for name in names}
