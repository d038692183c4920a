"""The training loop: a `for` over updates. It uses only torch; the caller passes iterators, reporting and saving, so
the same loop runs under Ray Train, Ray Tune, in a test and on a laptop."""

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed

from moray.batch import DataShardBatch
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.finite import FiniteWatch
from moray.distill.masks import staircase_probability
from moray.distill.parallel import Parallel, num_workers, sum_over_workers
from moray.distill.step import UpdateContext, num_rounds, run_update


@dataclass(frozen=True)
class Progress:
    """How far a run has come, including the parts before resumptions."""

    step: int = 0
    """Finished updates."""
    tokens: int = 0
    """Tokens in the batches of all data shards so far, without padding."""
    seconds: float = 0.0
    """Time spent in the loop."""


Report = Callable[[Progress, dict[str, float]], None]
"""report(progress, metrics), called every `logging_steps`, before each save and after the last update."""

Save = Callable[[Progress], None]
"""save(progress), called every `save_steps` and after the last update."""


@dataclass(frozen=True)
class Span:
    """Where a run begins and ends, in updates."""

    first: Progress
    total_steps: int
    steps_per_epoch: int
    epochs: int
    num_data_shards: int = 1
    """Data shards of all workers: see `activations.reading.epochs`."""
    stop_step: int | None = None
    """Where this part of the run ends, though another may follow; None for `total_steps`, which the schedules use."""

    @property
    def last_step(self) -> int:
        """Number of updates made when this part is done."""
        return self.total_steps if self.stop_step is None else min(self.total_steps, self.stop_step)


def train(
    parallel: Parallel,
    updates: Iterable[list[DataShardBatch]],
    span: Span,
    losses: LossConfig,
    config: TrainConfig,
    report: Report,
    save: Save,
) -> None:
    """Train from `span.first` to the end of `updates`, each of which holds one batch of every data shard of this
    worker.

    Random draws depend on seed, step and data shard alone: a resumed run, with as many workers or fewer, repeats what
    an uninterrupted run would have done. Apart from reports and checkpoints, the host waits in the loop only for which
    positions count (`losses`, and MoA's tokens that are not padding).

    Raises:
        NonFiniteError: a loss or gradient is not finite. This is noticed one update late, before anything of that
            update is reported or saved.
    """
    device = next(parallel.drafter.parameters()).device
    parallel.drafter.train()
    parallel.drafter.recomputes = config.activation_checkpointing
    step, tokens = span.first.step, 0
    watch = FiniteWatch()
    begin = time.perf_counter()

    def progress() -> Progress:
        everywhere = int(sum_over_workers(torch.tensor(tokens, dtype=torch.float64, device=device)))
        return Progress(step, span.first.tokens + everywhere, span.first.seconds + time.perf_counter() - begin)

    for data_shards in updates:
        is_saved = (step + 1) % config.save_steps == 0 or step + 1 == span.last_step
        is_reported = is_saved or (step + 1) % config.logging_steps == 0
        context = UpdateContext(
            step,
            span.steps_per_epoch,
            span.total_steps,
            staircase_probability(step // span.steps_per_epoch, span.epochs),
            num_rounds(span.num_data_shards),
            config.seed,
            is_reported,
        )
        result = run_update(parallel, data_shards, context)
        watch.check()  # checks the update before this one
        step += 1
        watch.follow(step, result, parallel.learning_rate)
        tokens += result.num_tokens
        if not is_reported:
            continue
        watch.check()
        done = progress()
        run_metrics = {"learning_rate": parallel.learning_rate, "peak_memory_bytes": _peak_memory(device)}
        report(done, result.metrics(losses.at(step / span.total_steps)) | run_metrics)
        if is_saved:
            save(done)
    watch.check()
    parallel.drafter.eval()


def _peak_memory(device: torch.device) -> float:
    """Maximum memory that any worker has used so far: on its GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
    else:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.tensor(most, dtype=torch.float64, device=device)
    if num_workers() > 1:
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    return float(peak)
