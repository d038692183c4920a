"""Distillation losses and the accuracy that stands for acceptance, summed over a batch's positions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig
from moray.drafters.base import DraftOutput
from moray.targets.head import TargetHead

MAX_STEPS_AHEAD = 8
"""Accuracy is reported for drafts of 1..8 steps past the last verified token."""

_LOGIT_CHUNK = 4096


@dataclass(frozen=True)
class LossSums:
    """Sums over the training positions of a batch (not means: workers hold different numbers of them)."""

    total: Float[Tensor, ""]
    feature: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    count: Int[Tensor, ""]
    correct_by_step: Int[Tensor, " ahead"]
    """How often the drafter's best token is the target's, by steps past the last verified token (1-based)."""
    count_by_step: Int[Tensor, " ahead"]


def distillation_loss(
    output: DraftOutput,
    batch: TrainBatch,
    start: Int[Tensor, "batch seq"],
    positions: Bool[Tensor, "batch seq"],
    head: TargetHead,
    weights: LossConfig,
) -> LossSums:
    """Feature loss (Smooth L1) and KL at the given positions (MoA, section 3.4 and table 6).

    The feature weight is shared equally by all predicted depths. Logits exist for `positions` only, a chunk
    at a time.
    """
    feature = output.last.new_zeros(())
    for depth, (predicted, scale) in output.features.items():
        real = batch.taps.hidden[depth][positions].float()
        difference = F.smooth_l1_loss(predicted[positions].float() / scale, real / scale, reduction="none")
        feature = feature + difference.mean(dim=-1).sum() / len(output.features)
    column = torch.arange(start.shape[1], device=start.device)
    ahead = (column - start)[positions]
    kl, correct = _kl_and_matches(output.last[positions], batch.taps.hidden[-1][positions], head)
    counted = ahead <= MAX_STEPS_AHEAD
    index = (ahead - 1).clamp(max=MAX_STEPS_AHEAD - 1)
    zeros = torch.zeros(MAX_STEPS_AHEAD, dtype=torch.long, device=start.device)
    return LossSums(
        total=weights.feature * feature + weights.kl * kl,
        feature=feature.detach(),
        kl=kl.detach(),
        count=positions.sum(),
        correct_by_step=zeros.scatter_add(0, index, (correct & counted).long()),
        count_by_step=zeros.scatter_add(0, index, counted.long()),
    )


def _kl_and_matches(
    drafted: Float[Tensor, "tokens hidden"], real: Float[Tensor, "tokens hidden"], head: TargetHead
) -> tuple[Float[Tensor, ""], Bool[Tensor, " tokens"]]:
    """Sum of KL(target || drafter), and where both have the same best token."""
    kl = drafted.new_zeros((), dtype=torch.float32)
    matches = []
    for begin in range(0, drafted.shape[0], _LOGIT_CHUNK):
        rows = slice(begin, begin + _LOGIT_CHUNK)
        with torch.no_grad():
            target_log = F.log_softmax(head.logits(real[rows].to(head.weight.dtype)).float(), dim=-1)
        draft_log = F.log_softmax(head.logits(drafted[rows].to(head.weight.dtype)).float(), dim=-1)
        kl = kl + F.kl_div(draft_log, target_log, reduction="sum", log_target=True)
        matches.append(draft_log.detach().argmax(dim=-1) == target_log.argmax(dim=-1))
    return kl, torch.cat(matches) if matches else torch.zeros(0, dtype=torch.bool, device=drafted.device)


def simulated_tau(accuracy_by_step: list[float]) -> float:
    """Tokens per target pass of a greedy chain, if acceptances were independent given the step:
    1 + a_1 + a_1 a_2 + ..., the bonus token being the 1."""
    tau, survival = 1.0, 1.0
    for accuracy in accuracy_by_step:
        survival *= accuracy
        tau += survival
    return tau
