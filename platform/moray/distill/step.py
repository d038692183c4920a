"""One update: process the batch of every data shard in turn, and divide gradients by the number of positions in all
data shards of all workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moray.batch import DataShardBatch
from moray.distill.configs import LossConfig
from moray.distill.losses import LossSums, simulated_tau
from moray.distill.masks import draw_view, loss_positions
from moray.distill.parallel import Parallel, num_workers, sum_over_workers
from moray.distill.token_losses import MAX_STEPS_AHEAD
from moray.drafters.learner import DraftView

_NUM_SUMS = 5


@dataclass(frozen=True)
class DataShardResult:
    """The contribution of one data shard to an update."""

    data_shard: int
    uids: tuple[str, ...]
    loss: Tensor
    """Sum over its positions."""


@dataclass(frozen=True)
class UpdateResult:
    """Sums of one update over this worker's data shards, still on the device: `metrics` waits for them.

    Values that are only for logs are present only if the update is reported.
    """

    data_shards: tuple[DataShardResult, ...]
    sums: Tensor  # [_NUM_SUMS + 2 * MAX_STEPS_AHEAD]: see `_pack`
    num_tokens: int
    num_padded: int
    grad_norm: Tensor
    may_go_on: Tensor
    """Whether losses and gradients allow training to go on; the same on all workers."""
    is_reported: bool

    def metrics(self, weights: LossConfig) -> dict[str, float]:
        """Means over all workers, for logs: losses per position, accuracy by step, simulated tau. All workers call this
        together, and only for a reported update."""
        assert self.is_reported, "the figures of this update were not computed"
        counts = self.sums.new_tensor([self.num_tokens, self.num_padded])
        values = sum_over_workers(torch.cat([self.sums, counts])).tolist()
        feature, kl, rejection, penalty, positions = values[:_NUM_SUMS]
        tokens, padded = values[-2:]
        count = max(1.0, positions)
        correct, counted = values[_NUM_SUMS : _NUM_SUMS + MAX_STEPS_AHEAD], values[_NUM_SUMS + MAX_STEPS_AHEAD : -2]
        accuracy = [c / n for c, n in zip(correct, counted, strict=True) if n]
        total = weights.feature * feature + weights.kl * kl + weights.total_variation * rejection
        metrics = {
            "loss": (total + penalty) / count,
            "feature_loss": feature / count,
            "kl": kl / count,
            "acceptance": 1.0 - rejection / count,
            "accuracy": sum(correct) / max(1.0, sum(counted)),
            "simulated_tau": simulated_tau(accuracy),
            "positions": positions,
            "padding_waste": 1.0 - tokens / max(1.0, padded),
            "grad_norm": float(self.grad_norm),
        }
        if penalty:
            metrics["penalty"] = penalty / count
        return metrics | {f"accuracy_step_{i + 1}": value for i, value in enumerate(accuracy)}


@dataclass(frozen=True)
class UpdateContext:
    """Number of an update in the run, and what its random draws depend on."""

    step: int
    """Updates made before it."""
    steps_per_epoch: int
    total_steps: int
    staircase_probability: float
    num_rounds: int
    """Maximum number of batches of a worker."""
    seed: int
    is_reported: bool = True
    """Whether to compute values that are only for logs: accuracies, and acceptance unless it is trained."""


def run_update(parallel: Parallel, data_shards: list[DataShardBatch], context: UpdateContext) -> UpdateResult:
    """Process this worker's data shards one after the other, then update the weights.

    Every random draw in data shard l comes from a generator seeded with (seed, step, l), whichever worker processes it.

    Args:
        parallel: the drafter, and how it is trained.
        data_shards: one batch of each; emptied on the way, so that a data shard's taps are freed after its turn.
        context: which update it is.
    """
    device = next(parallel.drafter.parameters()).device
    views = [_view(parallel, batch, context) for batch in data_shards]
    counts = [_num_positions(batch, view) for batch, view in zip(data_shards, views, strict=True)]
    positions = sum_over_workers(torch.tensor(float(sum(counts)), device=device))
    factor = 1.0 / positions.clamp(min=1.0)
    num_tokens = sum(batch.text.num_tokens for batch in data_shards)
    num_padded = sum(batch.num_padded for batch in data_shards)
    results: list[DataShardResult] = []
    packed = torch.zeros(_NUM_SUMS + 2 * MAX_STEPS_AHEAD, device=device)
    num_idle = context.num_rounds - len(data_shards) if parallel.has_equal_rounds else 0
    for number, view in enumerate(views):
        batch = data_shards.pop(0)
        whole, seen = batch.whole(device), _move(view, device)
        is_last = number + 1 == len(views)
        for _ in range(num_idle if is_last else 0):  # match the other workers' passes, with weight 0
            parallel.accumulate(whole, seen, 0.0, is_last=False, with_figures=False)
        sums = parallel.accumulate(whole, seen, factor, is_last, context.is_reported)
        packed += _pack(sums)
        results.append(DataShardResult(batch.data_shard, batch.uids, sums.total.detach()))
        del batch, whole  # free memory before the next data shard's taps are decoded
    norm, may_go_on = parallel.update(context.step, context.steps_per_epoch, context.total_steps)
    return UpdateResult(tuple(results), packed, num_tokens, num_padded, norm, may_go_on, context.is_reported)


def data_shards_of(rank: int, workers: int, num_data_shards: int) -> Sequence[int]:
    """The data shards that a worker processes: w, w + W, w + 2W, ..."""
    return range(rank, num_data_shards, workers)


def num_rounds(num_data_shards: int) -> int:
    """Maximum number of data shards of a worker."""
    return -(-num_data_shards // num_workers())


def _view(parallel: Parallel, batch: DataShardBatch, context: UpdateContext) -> DraftView:
    generator = torch.Generator().manual_seed(mix_seed(context.seed, context.step, batch.data_shard))
    config = parallel.drafter.config
    view = draw_view(
        batch.text, config.verified_period, context.staircase_probability, generator, layer_counts=config.layer_counts
    )
    return replace(view, progress=(context.step + 1) / context.total_steps)


def _num_positions(batch: DataShardBatch, view: DraftView) -> int:
    """Positions that the losses will count; they depend on the text alone, so they are known before any computation."""
    column = torch.arange(view.start.shape[1])
    return int((loss_positions(batch.text) & (view.start != column)).sum())


def _move(view: DraftView, device: torch.device) -> DraftView:
    staircase = None if view.staircase is None else view.staircase.to(device, non_blocking=True)
    return replace(view, start=view.start.to(device, non_blocking=True), staircase=staircase)


def _pack(sums: LossSums) -> Tensor:
    """feature, kl, rejection, penalty, positions; then the counts by steps ahead."""
    scalars = torch.stack([sums.feature, sums.kl, sums.rejection, sums.penalty, sums.count.float()])
    return torch.cat([scalars.float(), sums.correct_by_step.float(), sums.count_by_step.float()]).detach()


def mix_seed(*parts: int) -> int:
    """Derive a seed of 63 bits from small integers."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ (part + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
