"""What a trained drafter is worth, measured in a Ray task: plain decoding and speculation in turn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moray.bench.configs import EvaluateConfig
from moray.bench.runner import Runner
from moray.drafters.base import Drafter

FIGURES = {
    "tau": "tau",
    "tau_spread": "tau_spread",
    "speedup": "speedup_vs_plain",
    "speedup_spread": "speedup_spread",
    "tokens_per_second": "tokens_per_second",
    "draft_steps": "draft_steps",
    "draft_cost": "draft_cost",
    "verify_cost": "verify_cost",
    "efficiency": "efficiency",
    "lossless": "lossless",
    "num_prompts": "num_prompts",
    "num_tokens": "num_tokens",
}
"""Ours, and what an evaluation's report calls them."""


@dataclass(frozen=True)
class Answer:
    """What one prompt took, for comparisons of trials prompt by prompt."""

    tokens: int
    seconds: float
    plain_seconds: float
    cycles: int
    emitted: int

    def row(self) -> list[float]:
        """As it is kept."""
        return [self.tokens, self.seconds, self.plain_seconds, self.cycles, self.emitted]


def measure(evaluation: str, gpus: float) -> dict[str, dict[str, Any]]:
    """Figures of every drafter of an evaluation (as JSON), by name, with its answers. Runs in a task of its own.

    Raises:
        DataError: not one prompt fits into the context.
    """
    from moray.bench.loading import load_drafters, load_target, nothing_fits

    config = EvaluateConfig.model_validate_json(evaluation)
    if not gpus:  # those of the machine are for the workers
        config = config.model_copy(update={"target": config.target.model_copy(update={"device": "cpu"})})
    questions, tokenizer, target = load_target(config)
    drafters: dict[str, Drafter] = load_drafters(config.drafters, target, tokenizer)
    runner = Runner(target, drafters, tokenizer, config)
    for _ in runner.ask(questions):
        pass
    if not runner.measurement.asked:
        raise nothing_fits(config.questions, runner.capacity)
    drafted = runner.measurement.methods[1:]
    return {
        _name(method.name, method.tree, config): row
        for method, row in zip(drafted, figures(runner, config), strict=True)
    }


def figures(runner: Runner, config: EvaluateConfig) -> list[dict[str, Any]]:
    """Figures of every drafter and tree over what was asked so far, with their answers; `config` asked at one
    temperature."""
    from moray.bench.summary import summarise

    rows = summarise(runner.measurement, config.samplings, config.target.dtype)["rows"]
    plain, *drafted = runner.measurement.methods
    found = []
    for row, method in zip(rows, drafted, strict=True):
        answers = [
            Answer(
                len(own.tokens),
                own.seconds + own.prefill_seconds,
                other.seconds + other.prefill_seconds,
                own.num_cycles,
                sum(own.emitted),
            ).row()
            for own, other in zip(method.generations, plain.generations, strict=True)
        ]
        found.append({ours: row[theirs] for ours, theirs in FIGURES.items()} | {"answers": answers})
    return found


def _name(drafter: str, tree: str, config: EvaluateConfig) -> str:
    return drafter if len(config.trees) == 1 else f"{drafter}, {tree}"


def folder_key(folder: str) -> str:
    """What `measure` calls the drafter of a folder."""
    return Path(folder).name
