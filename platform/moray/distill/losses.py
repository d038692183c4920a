"""Distillation losses, and the accuracy that approximates acceptance, summed over a batch's positions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig
from moray.distill.token_losses import token_losses
from moray.drafters.learner import DraftOutput, Learner


@dataclass(frozen=True)
class LossSums:
    """Sums over the training positions of a batch (not means: workers hold different numbers of them)."""

    total: Float[Tensor, ""]
    feature: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    rejection: Float[Tensor, ""]
    penalty: Float[Tensor, ""]
    """See `DraftOutput.penalty`."""
    count: Int[Tensor, ""]
    correct_by_step: Int[Tensor, " ahead"]
    """How often the drafter's best token is the target's, by steps past the last verified token (1-based)."""
    count_by_step: Int[Tensor, " ahead"]


def distillation_loss(
    output: DraftOutput,
    batch: TrainBatch,
    positions: Bool[Tensor, "batch seq"],
    drafter: Learner,
    weights: LossConfig,
    with_figures: bool = True,
    seed: int = 0,
) -> LossSums:
    """Feature loss (smooth L1), KL and probability of rejection at the given positions (MoA, section 3.4, table 6).

    Each depth has its own share of the feature weight (see `Feature.weight`). A position at which nothing is predicted
    from an earlier one (start(i) = i) does not count, because it never occurs while decoding. Tensors over hidden size
    or vocabulary are created only for positions that count.

    Without figures, values that are only for logs are left out, and zero: accuracies, and rejection unless it is
    trained. `seed` draws the positions of `losses.position_share`; sums over them are scaled to all positions.
    """
    column = torch.arange(positions.shape[1], device=positions.device)
    is_made = torch.stack([prediction.start != column for prediction in output.predictions]).any(dim=0)
    rows, columns = (positions & is_made).nonzero(as_tuple=True)  # the host waits here
    real = batch.taps.hidden[-1][rows, columns]
    feature = torch.zeros((), dtype=torch.promote_types(real.dtype, torch.float32), device=real.device)
    for depth, (predicted, scale, weight) in output.features.items():
        wanted = real if depth == -1 else batch.taps.hidden[depth][rows, columns]
        guess = predicted[rows, columns].to(feature.dtype)
        difference = F.smooth_l1_loss(guess / scale, wanted.to(feature.dtype) / scale, reduction="none")
        share = weight[rows] if isinstance(weight, Tensor) else weight
        feature = feature + (difference.mean(dim=-1) * share).sum()
    penalty = torch.zeros_like(feature) if output.penalty is None else output.penalty
    drawn, factor = _draw(rows.shape[0], weights.position_share, seed, rows.device)
    real, rows_drawn, columns_drawn = real[drawn], rows[drawn], columns[drawn]
    tokens = token_losses(output.predictions, real, rows_drawn, columns_drawn, drafter, weights, with_figures)
    return LossSums(
        total=weights.feature * feature + factor * tokens.weighted + penalty,
        feature=feature.detach(),
        kl=factor * tokens.kl,
        rejection=factor * tokens.rejection,
        penalty=penalty.detach(),
        count=torch.full((), rows.shape[0], device=rows.device),
        correct_by_step=tokens.counts[0],
        count_by_step=tokens.counts[1],
    )


def _draw(count: int, share: float, seed: int, device: torch.device) -> tuple[slice | Int[Tensor, " drawn"], float]:
    """Which of `count` positions have their distributions compared, and the factor that scales their sum to all."""
    if share == 1.0 or count < 2:
        return slice(None), 1.0
    num_drawn = max(1, round(share * count))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:num_drawn].sort().values.to(device, non_blocking=True), count / num_drawn


def simulated_tau(accuracy_by_step: list[float]) -> float:
    """Tokens per target pass of a greedy chain if acceptances were independent given the step: 1 + a_1 + a_1 a_2 + ...,
    where the 1 is the bonus token."""
    tau, survival = 1.0, 1.0
    for accuracy in accuracy_by_step:
        survival *= accuracy
        tau += survival
    return tau
