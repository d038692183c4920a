"""The training loop: a `for` over batches. It knows torch; iterators, reporting and saving are handed in, so
the same loop runs under Ray Train, Ray Tune, in a test and on a laptop."""

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

Report = Callable[[int, dict[str, float]], None]
"""report(step, metrics), called every `log_steps`; step counts finished updates."""

Save = Callable[[int], None]
"""save(step), called every `checkpoint_steps` and after the last update."""


@dataclass(frozen=True)
class Span:
    """Where a run begins and ends, in updates."""

    first_step: int
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
    """Train from `span.first_step` to the end of `batches`.

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
    mask_width = drafter.config.mask_width
    drafter.train()
    step = span.first_step
    for batch in batches:
        generator = torch.Generator().manual_seed(_mix(config.seed, step, rank))
        stairs = staircase_probability(step // span.steps_per_epoch, span.epochs)
        result = train_step(model, drafter, batch.to(device), mask_width, stairs, losses, config, generator)
        check_finite(result, step)
        optimiser.step(step, span.steps_per_epoch, span.total_steps)
        step += 1
        if step % config.log_steps == 0 or step == span.total_steps:
            report(step, result.metrics(losses) | {"learning_rate": optimiser.learning_rate})
        if step % config.checkpoint_steps == 0 or step == span.total_steps:
            save(step)
    drafter.eval()


def _mix(*parts: int) -> int:
    """A seed in 63 bits from small integers."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
