"""Distillation losses and the accuracy that stands for acceptance, summed over a batch's positions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig
from moray.drafters.base import Drafter, DraftOutput, Prediction
from moray.errors import ConfigError

MAX_STEPS_AHEAD = 8
"""Accuracy is reported for drafts of 1..8 steps past the last verified token."""

_LOGIT_CHUNK = 4096


@dataclass(frozen=True)
class LossSums:
    """Sums over the training positions of a batch (not means: workers hold different numbers of them)."""

    total: Float[Tensor, ""]
    feature: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    refusal: Float[Tensor, ""]
    count: Int[Tensor, ""]
    correct_by_step: Int[Tensor, " ahead"]
    """How often the drafter's best token is the target's, by steps past the last verified token (1-based)."""
    count_by_step: Int[Tensor, " ahead"]


def distillation_loss(
    output: DraftOutput,
    batch: TrainBatch,
    positions: Bool[Tensor, "batch seq"],
    drafter: Drafter,
    weights: LossConfig,
) -> LossSums:
    """Feature loss (Smooth L1), KL and probability of refusal at the given positions (MoA, section 3.4, table 6).

    The feature weight is shared equally by all predicted depths. Logits exist for `positions` only, a chunk
    at a time. A prediction made from no earlier position (start(i) = i) does not count: it never occurs while
    decoding.

    Raises:
        ConfigError: `weights.feature` is set for a drafter that predicts no features.
    """
    if weights.feature and not output.features:
        raise ConfigError(
            f"losses.feature is {weights.feature}, but a drafter of type {type(drafter).__name__.lower()} predicts no "
            "features; give losses.feature=0 and a losses.kl or losses.acceptance"
        )
    column = torch.arange(positions.shape[1], device=positions.device)
    counted = positions & (output.predictions[0].start != column)
    feature = batch.taps.hidden[-1].new_zeros((), dtype=torch.float32)
    for depth, (predicted, scale) in output.features.items():
        real = batch.taps.hidden[depth][counted].float()
        difference = F.smooth_l1_loss(predicted[counted].float() / scale, real / scale, reduction="none")
        feature = feature + difference.mean(dim=-1).sum() / len(output.features)
    token_losses = [_token_losses(p, batch, positions & (p.start != column), drafter) for p in output.predictions]
    kl = torch.stack([p.weight * t.kl for p, t in zip(output.predictions, token_losses, strict=True)]).sum()
    refusal = torch.stack([p.weight * t.refusal for p, t in zip(output.predictions, token_losses, strict=True)]).sum()
    return LossSums(
        total=weights.feature * feature + weights.kl * kl + weights.acceptance * refusal,
        feature=feature.detach(),
        kl=kl.detach(),
        refusal=refusal.detach(),
        count=counted.sum(),
        correct_by_step=torch.stack([t.correct_by_step for t in token_losses]).sum(dim=0),
        count_by_step=torch.stack([t.count_by_step for t in token_losses]).sum(dim=0),
    )


@dataclass(frozen=True)
class _TokenLosses:
    kl: Float[Tensor, ""]
    refusal: Float[Tensor, ""]
    correct_by_step: Int[Tensor, " ahead"]
    count_by_step: Int[Tensor, " ahead"]


def _token_losses(
    prediction: Prediction, batch: TrainBatch, positions: Bool[Tensor, "batch seq"], drafter: Drafter
) -> _TokenLosses:
    """Sums over positions of what compares distributions over tokens.

    With a draft vocabulary KL is taken to the target renormalised on it; refusal to the target as it is:
    1 - sum min(p, q), the probability that a token sampled from q is refused (arXiv 2211.17192, theorem 3.5).
    """
    real = batch.taps.hidden[-1][positions]
    drafted = prediction.hidden[positions]
    ahead = (torch.arange(positions.shape[1], device=positions.device) - prediction.start)[positions]
    head, vocabulary = drafter.head, drafter.vocabulary
    kl = refusal = real.new_zeros((), dtype=torch.float32)
    matches = [torch.zeros(0, dtype=torch.bool, device=real.device)]
    for begin in range(0, real.shape[0], _LOGIT_CHUNK):
        rows = slice(begin, begin + _LOGIT_CHUNK)
        with torch.no_grad():
            target_log = F.log_softmax(head.logits(real[rows].to(head.weight.dtype)).float(), dim=-1)
            best = target_log.argmax(dim=-1)
            target_log = vocabulary.select(target_log)
        draft_log = F.log_softmax(prediction.score(drafted[rows]).float(), dim=-1)
        known_log = F.log_softmax(target_log, dim=-1) if vocabulary.is_reduced else target_log
        kl = kl + F.kl_div(draft_log, known_log, reduction="sum", log_target=True)
        refusal = refusal + (1.0 - torch.minimum(target_log.exp(), draft_log.exp()).sum(dim=-1)).sum()
        matches.append(vocabulary.to_tokens(draft_log.detach().argmax(dim=-1)) == best)
    counted = ahead <= MAX_STEPS_AHEAD
    index = (ahead - 1).clamp(min=0, max=MAX_STEPS_AHEAD - 1)
    zeros = torch.zeros(MAX_STEPS_AHEAD, dtype=torch.long, device=real.device)
    return _TokenLosses(
        kl,
        refusal,
        zeros.scatter_add(0, index, (torch.cat(matches) & counted).long()),
        zeros.scatter_add(0, index, counted.long()),
    )


def simulated_tau(accuracy_by_step: list[float]) -> float:
    """Tokens per target pass of a greedy chain, if acceptances were independent given the step:
    1 + a_1 + a_1 a_2 + ..., the bonus token being the 1."""
    tau, survival = 1.0, 1.0
    for accuracy in accuracy_by_step:
        survival *= accuracy
        tau += survival
    return tau
