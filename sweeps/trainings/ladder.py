"""The ladder of a sweep: at how many training tokens trials are measured, and how many updates that is."""

from dataclasses import dataclass

from moray.cluster.training.configs import DistillConfig
from sweeps.tuning.configs import LadderConfig


@dataclass(frozen=True)
class Rung:
    """One step of the ladder."""

    number: int
    tokens: int
    """Padding included, as `train.batch_tokens` counts: the same for all trials."""


def rungs_of(ladder: LadderConfig, tokens: int) -> list[Rung]:
    """The rungs up to `tokens`, by growing tokens."""
    first = max(1, tokens // ladder.reduction ** (ladder.rungs - 1))
    return [Rung(number, first * ladder.reduction**number) for number in range(ladder.rungs)]


def tokens_per_step(config: DistillConfig) -> int:
    """Tokens of one update, padding included."""
    return config.train.batch_tokens * config.workers.most * config.train.gradient_accumulation_steps


def steps_at(tokens: int, config: DistillConfig) -> int:
    """Updates that take so many tokens, at least one."""
    return max(1, round(tokens / tokens_per_step(config)))
