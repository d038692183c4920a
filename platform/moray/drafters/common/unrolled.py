"""What a position sees where training unrolls several draft steps (training-time test, arXiv 2503.01840, section 3.1).

A draft with root r reads the target's features before r, and its own from there on. Step 1 at position r predicts the
token at r + 1 (the root's draft), step 2 at position r + 1 the one after, and so on: step s at position i drafts for
the root r = i - s + 1.

    position                    0  1  2  3  4
    step 3 at 4 sees of step 1  x  x  x  .  .      keys up to the root, 2
                  of step 2     .  .  .  x  .      the first drafted token
                  of step 3     .  .  .  .  x      itself
"""

import torch
from jaxtyping import Int
from torch import Tensor

from moray.targets.visibility import Visible, Window

STEP_DECAY = 0.8
"""Weight of the token losses of each unrolled step, relative to the step before it; the weights add up to 1."""


def drafted_before(column: Int[Tensor, " seq"], step: int) -> Visible:
    """What each position sees in draft step `step` of the keys of all steps so far, side by side.

    A position without a root that far back sees the first key of step 1, and its output is not used.
    """
    root = column - (step - 1)
    windows = [Window(None, (root + 1).clamp(min=1)[None])]
    for further in range(1, step):
        own = root + further
        is_drafted = root >= 0
        windows.append(Window(torch.where(is_drafted, own, 0)[None], torch.where(is_drafted, own + 1, 0)[None]))
    return Visible(tuple(windows))


def from_step(start: Int[Tensor, "batch seq"], column: Int[Tensor, " seq"], step: int) -> Int[Tensor, "batch seq"]:
    """The last position whose target feature a step's prediction is based on; the position itself if there is none.

    Args:
        start: the same for step 1.
        column: 0, 1, 2, ...
        step: 1, 2, ...
    """
    earlier = start - (step - 1)
    return torch.where(earlier >= 0, earlier, column)
