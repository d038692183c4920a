"""Losses that compare distributions over tokens. No tensor over the vocabulary outlives its chunk of positions.

    chunk of rows -> target's log p, once -> each prediction: logits -> losses, and at once their gradient in the logits
                  -> gradient in the rows' hidden states and in the projection's weights, which is all that is kept

The losses are sums, so the backward pass only has to multiply: no logits are kept or recomputed for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from moray.distill.configs import LossConfig
from moray.drafters.learner import Learner, Prediction

MAX_STEPS_AHEAD = 8
"""Accuracy is reported for drafts of 1..8 steps past the last verified token."""

_CHUNK_NUMBERS = {"cuda": 1 << 26, "cpu": 6 << 20}
"""Logits in one chunk, by device: 512 positions with 128k tokens on a GPU, 128 with 49k on a CPU, where 24 MiB fit into
cache and into memory that malloc reuses (above 32 MiB it gets every tensor from the system anew, page by page). About
eight tensors of this size exist at once."""
_MAX_CHUNK = 4096


@dataclass(frozen=True)
class TokenLosses:
    """Sums over positions and predictions."""

    weighted: Float[Tensor, ""]
    """`losses.kl` * kl + `losses.total_variation` * rejection: the only one with a gradient."""
    kl: Float[Tensor, ""]
    rejection: Float[Tensor, ""]
    counts: Int[Tensor, "2 ahead"]
    """By steps past the last verified token: how often the drafter's best token is the target's, and out of how
    many."""


@dataclass(frozen=True)
class _Target:
    """The target's side of a chunk."""

    known_log: Float[Tensor, "rows draft"]
    """Log probabilities over the draft vocabulary, renormalised on it."""
    known: Float[Tensor, "rows draft"]
    """Their exponentials."""
    is_top: Bool[Tensor, "rows draft"] | None
    """Which tokens are the `losses.kl_top_k` most likely ones; None for all tokens."""
    probs: Float[Tensor, "rows draft"] | None
    """Probabilities as they are, which add up to 1 only over the whole vocabulary; None if nothing needs them."""
    best: Int[Tensor, " rows"] | None
    """The most likely of all tokens; None without figures."""


def token_losses(
    predictions: tuple[Prediction, ...],
    real: Float[Tensor, "positions hidden"],
    rows: Int[Tensor, " positions"],
    columns: Int[Tensor, " positions"],
    drafter: Learner,
    weights: LossConfig,
    with_figures: bool = True,
) -> TokenLosses:
    """Sums at positions (rows, columns), where `real` holds the target's last hidden states.

    With a draft vocabulary, KL is taken to the target renormalised on it, and rejection to the target as it is: 1 - sum
    min(p, q), the probability that a token sampled from q is rejected (arXiv 2211.17192, theorem 3.5). Without figures,
    counts are zero, and so is rejection unless it has a weight.
    """
    tensors = [tensor for prediction in predictions for tensor in (prediction.hidden, *prediction.trained)]
    job = _Job(predictions, real, rows, columns, drafter, weights, torch.is_grad_enabled(), with_figures)
    return TokenLosses(*_Sums.apply(job, *tensors))


@dataclass(frozen=True)
class _Job:
    predictions: tuple[Prediction, ...]
    real: Tensor
    rows: Tensor
    columns: Tensor
    drafter: Learner
    weights: LossConfig
    needs_gradients: bool
    with_figures: bool

    def chunks(self) -> list[slice]:
        numbers = _CHUNK_NUMBERS["cpu" if self.real.device.type == "cpu" else "cuda"]
        size = max(1, min(_MAX_CHUNK, numbers // self.drafter.spec.vocab_size))
        return [slice(begin, begin + size) for begin in range(0, self.rows.shape[0], size)]

    def target(self, chunk: slice) -> _Target:
        """The target's distributions. With a reduced draft vocabulary, logits over all tokens are computed only for
        rejection and figures."""
        head, vocabulary = self.drafter.head, self.drafter.vocabulary
        real = self.real[chunk].to(head.weight.dtype)
        # Not `vocabulary.logits`: a drafter packed for decoding rounds its rows.
        logits = _precise(F.linear(real, vocabulary.rows) if vocabulary.is_reduced else head.logits(real))
        known_log = F.log_softmax(logits, dim=-1)
        known = known_log.exp()
        is_top = _top(known, self.weights.kl_top_k)
        if not (self.with_figures or self.weights.total_variation):
            return _Target(known_log, known, is_top, None, None)
        full = _precise(head.logits(real)) if vocabulary.is_reduced else logits
        best = full.argmax(dim=-1) if self.with_figures else None
        if not vocabulary.is_reduced:
            return _Target(known_log, known, is_top, known, best)
        share = (logits.logsumexp(dim=-1, keepdim=True) - full.logsumexp(dim=-1, keepdim=True)).exp()
        return _Target(known_log, known, is_top, known * share, best)


class _Sums(torch.autograd.Function):
    """`TokenLosses` of a job, and gradients with respect to every prediction's hidden states and trained weights, in
    that order.

    The job holds these tensors too; they are also passed as arguments so that autograd can return their gradients.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(job.real.dtype, torch.float32)
        sums = torch.zeros(2, dtype=dtype, device=job.real.device)  # KL, rejection
        counts = torch.zeros(2, MAX_STEPS_AHEAD, dtype=torch.long, device=job.real.device)
        gradients = [_Gradients(p, job.rows.shape[0]) for p in job.predictions] if job.needs_gradients else []
        for chunk in job.chunks():
            target = job.target(chunk)
            for index, prediction in enumerate(job.predictions):
                _add_chunk(job, chunk, target, prediction, sums, counts, gradients[index] if gradients else None)
        kl, rejection = sums.unbind()
        weighted = job.weights.kl * kl + job.weights.total_variation * rejection
        ctx.mark_non_differentiable(kl, rejection, counts)
        ctx.shapes = [p.hidden.shape for p in job.predictions]
        ctx.save_for_backward(job.rows, job.columns, *(tensor for g in gradients for tensor in (g.hidden, *g.trained)))
        ctx.num_trained = [len(p.trained) for p in job.predictions]
        return weighted, kl, rejection, counts

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, upstream: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows, columns, *saved = ctx.saved_tensors
        result: list[Tensor | None] = [None]
        for shape, num_trained in zip(ctx.shapes, ctx.num_trained, strict=True):
            hidden, *trained = saved[: 1 + num_trained]
            saved = saved[1 + num_trained :]
            result.append(hidden.new_zeros(shape).index_put_((rows, columns), hidden * upstream.to(hidden.dtype)))
            result.extend(gradient * upstream.to(gradient.dtype) for gradient in trained)
        return tuple(result)


class _Gradients:
    """The gradients of one prediction, accumulated over its chunks."""

    def __init__(self, prediction: Prediction, num_positions: int) -> None:
        self.hidden = prediction.hidden.new_zeros(num_positions, prediction.hidden.shape[2])
        self.trained = [torch.zeros_like(weight) for weight in prediction.trained]

    def add(self, chunk: slice, hidden: Tensor, *trained: Tensor) -> None:
        self.hidden[chunk] = hidden
        for total, gradient in zip(self.trained, trained, strict=True):
            total += gradient


def _add_chunk(
    job: _Job,
    chunk: slice,
    target: _Target,
    prediction: Prediction,
    sums: Tensor,
    counts: Tensor,
    gradients: _Gradients | None,
) -> None:
    """Add the sums and gradients of one prediction for one chunk of positions.

    Positions at which it makes no prediction (`start` is the position itself) are computed with weight 0: selecting the
    others would make the host wait for the device.
    """
    row, column = job.rows[chunk], job.columns[chunk]
    ahead = column - prediction.start[row, column]
    is_made = ahead > 0
    hidden = prediction.hidden[row, column].detach().requires_grad_()
    trained = [weight.detach().requires_grad_() for weight in prediction.trained]
    with torch.set_grad_enabled(gradients is not None):
        logits = prediction.project(hidden, *trained)
    draft_log = F.log_softmax(_precise(logits.detach()), dim=-1)
    divergence, wanted = _divergence(draft_log, target)
    share = is_made.to(sums.dtype) * prediction.weight
    sums[0] += (share * divergence).sum()
    if target.best is not None:
        is_right = job.drafter.vocabulary.to_tokens(draft_log.argmax(dim=-1)) == target.best
        is_counted = is_made & (ahead <= MAX_STEPS_AHEAD)
        index = (ahead - 1).clamp(0, MAX_STEPS_AHEAD - 1)
        counts.scatter_add_(1, index.expand(2, -1), torch.stack([is_right & is_counted, is_counted]).long())
    probs = draft_log.exp_()
    if target.probs is not None:
        overlap = torch.minimum(target.probs, probs).sum(dim=-1)
        sums[1] += (share * (1.0 - overlap)).sum()
    if gradients is not None:
        slope = _slope(probs, wanted, target, job.weights).mul_(share[:, None]).to(logits.dtype)
        gradients.add(chunk, *torch.autograd.grad(logits, [hidden, *trained], slope))


def _top(known: Float[Tensor, "rows draft"], k: int | None) -> Bool[Tensor, "rows draft"] | None:
    if k is None:
        return None
    return torch.zeros_like(known, dtype=torch.bool).scatter_(1, known.topk(k, dim=-1).indices, True)


def _divergence(
    draft_log: Float[Tensor, "rows draft"], target: _Target
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows draft"]]:
    """KL(p || q), and the target probabilities p whose difference q - p is the gradient in q's logits.

    With `losses.kl_top_k`, all tokens outside the target's top k are one event, and p shares that event's probability
    among them in q's own proportions: their order is not trained. k must be below the size of the draft vocabulary, or
    KL is NaN; `Objective` refuses others.
    """
    if target.is_top is None:
        return (target.known * (target.known_log - draft_log)).sum(dim=-1), target.known
    top = target.is_top
    rest_log = target.known_log.masked_fill(top, -torch.inf).logsumexp(dim=-1)
    draft_rest = draft_log.masked_fill(top, -torch.inf)
    rest = rest_log.exp()
    difference = torch.where(top, target.known * (target.known_log - draft_log), 0.0).sum(dim=-1)
    difference = difference + rest * (rest_log - draft_rest.logsumexp(dim=-1))
    return difference, torch.where(top, target.known, rest[:, None] * draft_rest.softmax(dim=-1))


def _slope(
    probs: Float[Tensor, "rows draft"], wanted: Float[Tensor, "rows draft"], target: _Target, weights: LossConfig
) -> Float[Tensor, "rows draft"]:
    """The gradient with respect to the logits of softmax q = `probs`, row by row.

    Of KL(p || q) with p = `wanted`: q - p. Of 1 - sum min(p, q), with s = 1 where q < p and else 0: -q (s - sum q s).
    """
    slope = (probs - wanted).mul_(weights.kl)
    if weights.total_variation and target.probs is not None:
        below = probs * (probs < target.probs)
        below.addcmul_(probs, below.sum(dim=-1, keepdim=True), value=-1.0)
        slope.sub_(below, alpha=weights.total_variation)
    return slope


def _precise(logits: Float[Tensor, "rows any"]) -> Float[Tensor, "rows any"]:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
