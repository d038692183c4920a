"""The training loop: a `for` over batches. It knows torch; iterators, reporting and saving are handed in, so
the same loop runs under Ray Train, Ray Tune, in a test and on a laptop."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed
from torch import nn

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.masks import staircase_probability
from moray.distill.optim import Optimiser
from moray.distill.step import check_finite, train_step
from moray.drafters.base import Drafter


@dataclass(frozen=True)
class Progress:
    """How far a run is, interruptions and resumptions together."""

    step: int = 0
    """Finished updates."""
    tokens: int = 0
    """Tokens of all workers' batches so far, padding not counted."""
    seconds: float = 0.0
    """Time spent in the loop."""


Report = Callable[[Progress, dict[str, float]], None]
"""report(progress, metrics), called every `log_steps` and after the last update."""

Save = Callable[[Progress], None]
"""save(progress), called every `checkpoint_steps` and after the last update."""


@dataclass(frozen=True)
class Span:
    """Where a run begins and ends, in updates."""

    first: Progress
    total_steps: int
    steps_per_epoch: int
    epochs: int


def train(
    drafter: Drafter,
    optimiser: Optimiser,
    batches: Iterable[TrainBatch],
    span: Span,
    losses: LossConfig,
    config: TrainConfig,
    report: Report,
    save: Save,
) -> None:
    """Train from `span.first` to the end of `batches`.

    Every draw of step s on worker r comes from a generator seeded by (seed, s, r): a resumed run repeats
    exactly what an unbroken one would have done.

    Raises:
        DataError: a gradient is not finite.
    """
    model: nn.Module = drafter
    rank = 0
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(drafter, forward_sync_buffers=False)
        rank = torch.distributed.get_rank()
    device = next(drafter.parameters()).device
    drafter.train()
    step, tokens = span.first.step, torch.zeros((), dtype=torch.float64, device=device)
    begin = time.perf_counter()

    def progress() -> Progress:
        return Progress(step, span.first.tokens + int(tokens), span.first.seconds + time.perf_counter() - begin)

    for batch in batches:
        generator = torch.Generator().manual_seed(_mix(config.seed, step, rank))
        stairs = staircase_probability(step // span.steps_per_epoch, span.epochs)
        result = train_step(model, drafter, batch.to(device), stairs, losses, config, generator)
        check_finite(result, step)
        optimiser.step(step, span.steps_per_epoch, span.total_steps)
        step += 1
        tokens += result.num_tokens
        if step % config.log_steps == 0 or step == span.total_steps:
            report(progress(), result.metrics(losses) | {"learning_rate": optimiser.learning_rate})
        if step % config.checkpoint_steps == 0 or step == span.total_steps:
            save(progress())
    drafter.eval()


def _mix(*parts: int) -> int:
    """A seed in 63 bits from small integers."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
