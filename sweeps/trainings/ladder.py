"""The ladder of a sweep: the numbers of training tokens at which trials are measured, and the updates they take."""

from dataclasses import dataclass

from moray.cluster.training.configs import DistillConfig
from sweeps.tuning.configs import LadderConfig


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder."""

    number: int
    tokens: int
    """Training tokens, padding included as in `train.batch_tokens`; the same for all trials."""


def rungs_of(ladder: LadderConfig, tokens: int) -> list[Rung]:
    """The rungs up to `tokens`, in ascending order."""
    first = max(1, tokens // ladder.reduction ** (ladder.rungs - 1))
    return [Rung(number, first * ladder.reduction**number) for number in range(ladder.rungs)]


def tokens_per_step(config: DistillConfig) -> int:
    """Tokens per update, padding included."""
    return config.train.batch_tokens * config.workers.max_workers * config.train.gradient_accumulation_steps


def steps_at(tokens: int, config: DistillConfig) -> int:
    """The number of updates that take this many tokens, at least one."""
    return max(1, round(tokens / tokens_per_step(config)))
