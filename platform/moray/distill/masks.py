"""Which positions of a training sequence count as verified (MoA, section 3.2), and which ones train."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moray.batch import TrainBatch
from moray.drafters.base import DraftView


def draw_view(
    batch: TrainBatch, mask_width: tuple[int, int], staircase_probability: float, generator: torch.Generator
) -> DraftView:
    """Draw, per sequence, a period P uniform over low..high-1, a phase, and whether it is a staircase.

        response      0  0  0  1  1  1  1  1  1
        verified      x  x  x  .  x  .  .  x  .      P = 3, phase 2
        start         0  1  2  2  4  4  4  7  7

    Every prompt position is verified; in a response every P-th one. All draws come from `generator` on the
    CPU, so a batch's view is the same on every device.
    """
    size = batch.tokens.shape[0]
    period = torch.randint(mask_width[0], mask_width[1], (size,), generator=generator)
    phase = (torch.rand(size, generator=generator) * period).long()
    staircase = torch.rand(size, generator=generator) < staircase_probability
    start = verified_start(batch.response_mask, period.to(batch.tokens.device), phase.to(batch.tokens.device))
    return DraftView(start, staircase.to(batch.tokens.device))


def verified_start(
    response_mask: Bool[Tensor, "batch seq"], period: Int[Tensor, " batch"], phase: Int[Tensor, " batch"]
) -> Int[Tensor, "batch seq"]:
    """start(i): the latest verified position <= i."""
    position = torch.arange(response_mask.shape[1], device=response_mask.device)
    prompt_end = torch.where(response_mask, -1, position).cummax(dim=1).values
    since_prompt = position - prompt_end - 1  # 0 at the first token of each response
    verified = ~response_mask | ((since_prompt + phase[:, None]) % period[:, None] == 0)
    verified[:, 0] = True  # something must be known before the first draft
    return torch.where(verified, position, -1).cummax(dim=1).values


def loss_positions(batch: TrainBatch, view: DraftView) -> Bool[Tensor, "batch seq"]:
    """Positions that train: the next token is a response token, and the drafter could not see its own
    memory there (i = start(i) never occurs while decoding)."""
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    next_is_response = torch.zeros_like(batch.response_mask)
    next_is_response[:, :-1] = batch.response_mask[:, 1:]
    inside = position + 1 < batch.lengths[:, None]
    return next_is_response & inside & (view.start != position)


def staircase_probability(epoch: int, epochs: int) -> float:
    """Curriculum of the released code: falls linearly from 1 to 0 over the first half of the epochs.

    With a single epoch there is no first half to speak of, and no staircase.
    """
    return max(0.0, 1.0 - epoch / (epochs / 2)) if epochs > 1 else 0.0
