"""Which positions of a training sequence count as verified (MoA, section 3.2), and which ones train."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moray.batch import TrainBatch
from moray.drafters.learner import DraftView


def draw_view(
    batch: TrainBatch,
    period_range: tuple[int, int] | None,
    staircase_probability: float,
    generator: torch.Generator,
    layer_counts: tuple[int, ...] = (),
) -> DraftView:
    """Draw, per sequence, a period P uniform over low..high-1, a phase, and whether it is a staircase; also one of
    several values of N, as evenly as the batch allows.

    Without a range, every position is predicted from the one before it.

        response      0  0  0  1  1  1  1  1  1
        verified      x  x  x  .  x  .  .  x  .      P = 3, phase 2
        start         0  1  2  2  4  4  4  7  7

    Every prompt position is verified, and every P-th position of a response. All draws come from `generator` on the
    CPU, so a batch's view is the same on every device.
    """
    size, seq = batch.tokens.shape
    device = batch.tokens.device
    if period_range is None:
        seed = int(torch.randint(1 << 62, (), generator=generator))
        before = torch.arange(seq, device=device).sub(1).clamp(min=0).expand(size, seq)
        return DraftView(before, None, seed, _draw_layer_counts(layer_counts, size, generator))
    period = torch.randint(period_range[0], period_range[1], (size,), generator=generator)
    phase = (torch.rand(size, generator=generator) * period).long()
    staircase = torch.rand(size, generator=generator) < staircase_probability  # on the CPU, so `any` does not wait
    seed = int(torch.randint(1 << 62, (), generator=generator))
    start = verified_start(batch.response_mask, period.to(device), phase.to(device))
    drawn = _draw_layer_counts(layer_counts, size, generator)
    return DraftView(start, staircase.to(device) if staircase.any() else None, seed, drawn)


def _draw_layer_counts(layer_counts: tuple[int, ...], size: int, generator: torch.Generator) -> tuple[int, ...] | None:
    if len(layer_counts) < 2:
        return None
    first = torch.randint(len(layer_counts), (), generator=generator)  # random: which N get one sequence more
    return tuple(
        layer_counts[i] for i in ((torch.randperm(size, generator=generator) + first) % len(layer_counts)).tolist()
    )


def verified_start(
    response_mask: Bool[Tensor, "batch seq"], period: Int[Tensor, " batch"], phase: Int[Tensor, " batch"]
) -> Int[Tensor, "batch seq"]:
    """start(i): the latest verified position <= i."""
    position = torch.arange(response_mask.shape[1], device=response_mask.device)
    prompt_end = torch.where(response_mask, -1, position).cummax(dim=1).values
    since_prompt = position - prompt_end - 1  # 0 at the first token of each response
    verified = ~response_mask | ((since_prompt + phase[:, None]) % period[:, None] == 0)
    verified[:, 0] = True  # the first draft needs a verified token before it
    return torch.where(verified, position, -1).cummax(dim=1).values


def loss_positions(batch: TrainBatch) -> Bool[Tensor, "batch seq"]:
    """Positions that train: the next token is a response token."""
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    next_is_response = torch.zeros_like(batch.response_mask)
    next_is_response[:, :-1] = batch.response_mask[:, 1:]
    return next_is_response & (position + 1 < batch.lengths[:, None])


def staircase_probability(epoch: int, epochs: int) -> float:
    """Curriculum of the released code: falls linearly from 1 to 0 over the first half of the epochs.

    With a single epoch there is no staircase.
    """
    return max(0.0, 1.0 - epoch / (epochs / 2)) if epochs > 1 else 0.0
