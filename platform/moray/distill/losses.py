"""Distillation losses and the accuracy that stands for acceptance, summed over a batch's positions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.batch import TrainBatch
from moray.distill.configs import LossConfig
from moray.drafters.base import Drafter, DraftOutput

MAX_STEPS_AHEAD = 8
"""Accuracy is reported for drafts of 1..8 steps past the last verified token."""

_LOGIT_CHUNK = 4096


@dataclass(frozen=True)
class LossSums:
    """Sums over the training positions of a batch (not means: workers hold different numbers of them)."""

    total: Float[Tensor, ""]
    feature: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    rejection: Float[Tensor, ""]
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
    """Feature loss (Smooth L1), KL and probability of rejection at the given positions (MoA, section 3.4, table 6).

    The feature weight is shared equally by all predicted depths. Logits exist for `positions` only, a chunk
    at a time. A prediction made from no earlier position (start(i) = i) does not count: it never occurs while
    decoding.
    """
    column = torch.arange(positions.shape[1], device=positions.device)
    counted = positions & (output.predictions[0].start != column)
    feature = batch.taps.hidden[-1].new_zeros((), dtype=torch.float32)
    for depth, (predicted, scale) in output.features.items():
        real = batch.taps.hidden[depth][counted].float()
        difference = F.smooth_l1_loss(predicted[counted].float() / scale, real / scale, reduction="none")
        feature = feature + difference.mean(dim=-1).sum() / len(output.features)
    token_losses = _token_losses(output, batch, positions, drafter)
    kl, rejection = token_losses.kl, token_losses.rejection
    return LossSums(
        total=weights.feature * feature + weights.kl * kl + weights.acceptance * rejection,
        feature=feature.detach(),
        kl=kl.detach(),
        rejection=rejection.detach(),
        count=counted.sum(),
        correct_by_step=token_losses.correct_by_step,
        count_by_step=token_losses.count_by_step,
    )


@dataclass(frozen=True)
class _TokenLosses:
    kl: Float[Tensor, ""]
    rejection: Float[Tensor, ""]
    correct_by_step: Int[Tensor, " ahead"]
    count_by_step: Int[Tensor, " ahead"]


def _token_losses(
    output: DraftOutput, batch: TrainBatch, positions: Bool[Tensor, "batch seq"], drafter: Drafter
) -> _TokenLosses:
    """Sums over positions and predictions of what compares distributions over tokens.

    With a draft vocabulary KL is taken to the target renormalised on it; rejection to the target as it is:
    1 - sum min(p, q), the probability that a token sampled from q is rejected (arXiv 2211.17192, theorem 3.5).
    """
    rows, columns = positions.nonzero(as_tuple=True)
    head, vocabulary = drafter.head, drafter.vocabulary
    # Every weight is part of the graph, also in a batch without one position to train on.
    kl = rejection = torch.stack([0.0 * p.score(p.hidden[0, :1]).float().sum() for p in output.predictions]).sum()
    counts = torch.zeros(2, MAX_STEPS_AHEAD, dtype=torch.long, device=positions.device)
    for begin in range(0, rows.shape[0], _LOGIT_CHUNK):
        row, column = rows[begin : begin + _LOGIT_CHUNK], columns[begin : begin + _LOGIT_CHUNK]
        with torch.no_grad():  # the target's side once for all predictions
            real = batch.taps.hidden[-1][row, column].to(head.weight.dtype)
            full_log = F.log_softmax(head.logits(real).float(), dim=-1)
            best, target_log = full_log.argmax(dim=-1), vocabulary.select(full_log)
            known_log = F.log_softmax(target_log, dim=-1) if vocabulary.is_reduced else target_log
        for prediction in output.predictions:
            ahead = column - prediction.start[row, column]
            made = ahead > 0
            draft_log = F.log_softmax(prediction.score(prediction.hidden[row[made], column[made]]).float(), dim=-1)
            divergence = F.kl_div(draft_log, known_log[made], reduction="sum", log_target=True)
            overlap = torch.minimum(target_log[made].exp(), draft_log.exp()).sum(dim=-1)
            kl = kl + prediction.weight * divergence
            rejection = rejection + prediction.weight * (1.0 - overlap).sum()
            is_right = vocabulary.to_tokens(draft_log.detach().argmax(dim=-1)) == best[made]
            counted = ahead[made] <= MAX_STEPS_AHEAD
            index = (ahead[made] - 1).clamp(max=MAX_STEPS_AHEAD - 1)
            counts = counts.scatter_add(1, index.expand(2, -1), torch.stack([is_right & counted, counted]).long())
    return _TokenLosses(kl, rejection, counts[0], counts[1])


def simulated_tau(accuracy_by_step: list[float]) -> float:
    """Tokens per target pass of a greedy chain, if acceptances were independent given the step:
    1 + a_1 + a_1 a_2 + ..., the bonus token being the 1."""
    tau, survival = 1.0, 1.0
    for accuracy in accuracy_by_step:
        survival *= accuracy
        tau += survival
    return tau
