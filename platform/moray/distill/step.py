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

    sums: Tensor  # [3 + 2 * MAX_STEPS_AHEAD]: feature, kl, count, correct by step, count by step
    grad_norm: Tensor

    def metrics(self, weights: LossConfig) -> dict[str, float]:
        """Means for people: losses per position, accuracy by step, simulated tau."""
        values = self.sums.tolist()
        feature, kl, count = values[0], values[1], max(1.0, values[2])
        correct, counts = values[3 : 3 + MAX_STEPS_AHEAD], values[3 + MAX_STEPS_AHEAD :]
        accuracy = [c / n for c, n in zip(correct, counts, strict=True) if n]
        metrics = {
            "loss": (weights.feature * feature + weights.kl * kl) / count,
            "feature_loss": feature / count,
            "kl": kl / count,
            "accuracy": sum(correct) / max(1.0, sum(counts)),
            "simulated_tau": simulated_tau(accuracy),
            "positions": values[2],
            "grad_norm": float(self.grad_norm),
        }
        return metrics | {f"accuracy_step_{i + 1}": value for i, value in enumerate(accuracy)}


def train_step(
    model: nn.Module,
    drafter: Drafter,
    batch: TrainBatch,
    mask_width: tuple[int, int],
    staircase_probability: float,
    losses: LossConfig,
    train: TrainConfig,
    generator: torch.Generator,
) -> StepResult:
    """Accumulate this batch's gradients, averaged over the training positions of all workers.

    `model` is the drafter itself or its DistributedDataParallel wrapper.
    """
    view = draw_view(batch, mask_width, staircase_probability, generator)
    positions = loss_positions(batch, view)
    device_type = batch.tokens.device.type
    precise = train.precision == "float32"
    with nullcontext() if precise else torch.autocast(device_type, dtype=torch.bfloat16):
        output = model(batch, view)
    sums = distillation_loss(output, batch, view.start, positions, drafter.head, losses)
    packed = _pack(sums)
    workers = 1
    if torch.distributed.is_initialized():
        workers = torch.distributed.get_world_size()
        torch.distributed.all_reduce(packed)
    # DDP averages gradients over workers; undo that and divide by the number of positions everywhere.
    (sums.total * (workers / packed[2].clamp(min=1.0))).backward()
    grad_norm = nn.utils.clip_grad_norm_(drafter.parameters(), train.clip)
    return StepResult(packed, grad_norm)


def check_finite(result: StepResult, step: int) -> None:
    """Stop before a non-finite gradient reaches the weights' checkpoint."""
    if not bool(torch.isfinite(result.grad_norm)):
        raise DataError(
            f"step {step}: the gradient is {float(result.grad_norm)}; lower optim.lr, or cache the activations again"
        )


def _pack(sums: LossSums) -> Tensor:
    scalars = torch.stack([sums.feature.float(), sums.kl.float(), sums.count.float()])
    return torch.cat([scalars, sums.correct_by_step.float(), sums.count_by_step.float()])
