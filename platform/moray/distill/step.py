"""One training step up to its gradients: draw the view, predict, lose, go back. Counts exactly across workers."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor, nn

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig, TrainConfig
from moray.distill.losses import MAX_STEPS_AHEAD, LossSums, distillation_loss, simulated_tau
from moray.distill.masks import draw_view, loss_positions
from moray.drafters.base import Drafter
from moray.errors import DataError


@dataclass(frozen=True)
class StepResult:
    """Sums of one step over all workers, still on the device: `metrics` waits for them."""

    sums: Tensor  # [5 + 2 * MAX_STEPS_AHEAD]: see `_pack`
    grad_norm: Tensor

    @property
    def num_tokens(self) -> Tensor:
        """Tokens of all workers' batches, padding not counted."""
        return self.sums[4]

    def metrics(self, weights: LossConfig) -> dict[str, float]:
        """Means for people: losses per position, accuracy by step, simulated tau."""
        values = self.sums.tolist()
        feature, kl, rejection, positions = values[:4]
        count = max(1.0, positions)
        correct, counts = values[5 : 5 + MAX_STEPS_AHEAD], values[5 + MAX_STEPS_AHEAD :]
        accuracy = [c / n for c, n in zip(correct, counts, strict=True) if n]
        metrics = {
            "loss": (weights.feature * feature + weights.kl * kl + weights.acceptance * rejection) / count,
            "feature_loss": feature / count,
            "kl": kl / count,
            "acceptance": 1.0 - rejection / count,
            "accuracy": sum(correct) / max(1.0, sum(counts)),
            "simulated_tau": simulated_tau(accuracy),
            "positions": positions,
            "grad_norm": float(self.grad_norm),
        }
        return metrics | {f"accuracy_step_{i + 1}": value for i, value in enumerate(accuracy)}


def train_step(
    model: nn.Module,
    drafter: Drafter,
    batch: TrainBatch,
    staircase_probability: float,
    losses: LossConfig,
    train: TrainConfig,
    generator: torch.Generator,
) -> StepResult:
    """Accumulate this batch's gradients, averaged over the training positions of all workers.

    `model` is the drafter itself or its DistributedDataParallel wrapper.
    """
    view = draw_view(batch, drafter.config.verified_period, staircase_probability, generator)
    device_type = batch.tokens.device.type
    precise = train.precision == "float32"
    with nullcontext() if precise else torch.autocast(device_type, dtype=torch.bfloat16):
        output = model(batch, view)
    sums = distillation_loss(output, batch, loss_positions(batch), drafter, losses)
    packed = _pack(sums, batch)
    workers = 1
    if torch.distributed.is_initialized():
        workers = torch.distributed.get_world_size()
        torch.distributed.all_reduce(packed)
    # DDP averages gradients over workers; undo that and divide by the number of positions everywhere.
    (sums.total * (workers / packed[3].clamp(min=1.0))).backward()
    grad_norm = nn.utils.clip_grad_norm_(drafter.parameters(), train.clip)
    return StepResult(packed, grad_norm)


def check_finite(result: StepResult, step: int) -> None:
    """Stop before a non-finite gradient reaches the weights' checkpoint."""
    if not bool(torch.isfinite(result.grad_norm)):
        raise DataError(
            f"step {step}: the gradient is {float(result.grad_norm)}; lower optim.lr, or cache the activations again"
        )


def _pack(sums: LossSums, batch: TrainBatch) -> Tensor:
    """feature, kl, rejection, positions, tokens; then what is counted by steps ahead."""
    tokens = batch.lengths.sum().to(sums.kl.device)
    scalars = torch.stack([sums.feature, sums.kl, sums.rejection, sums.count.float(), tokens.float()])
    return torch.cat([scalars.float(), sums.correct_by_step.float(), sums.count_by_step.float()])
