"""What T-step bounded training lets a position see (MoA, section 3.2), from start(i), the last verified position <= i.

position      0  1  2  3  4
start         0  0  2  2  2
own           0  01 012 ..          j <= i
own, stairs   0  1  2  3  34        start(i) < j <= i, and i itself
memory        0  0  012 012 012     j <= start(i)
drafted       -  1  -  3  34        start(i) < j <= i
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moray.drafters.common.attention import Mask
from moray.targets.visibility import Visible, Window


def own_tokens(start: Int[Tensor, "batch seq"], staircase: Bool[Tensor, " batch"] | None) -> Mask:
    """What self-attention sees; with a staircase, it looks no further back than the last verified position."""
    if staircase is None:
        return "causal"
    column = torch.arange(start.shape[1], device=start.device)
    first = torch.where(staircase[:, None], torch.minimum(start + 1, column), 0)
    return Visible((Window(first, column[None] + 1),))


def memory_tokens(start: Int[Tensor, "batch seq"]) -> Visible:
    """What cross-attention sees of the memory: verified positions only."""
    return Visible((Window(None, start + 1),))


def past_and_drafted(start: Int[Tensor, "batch seq"]) -> Visible:
    """What the target's last layers see of [real ; predicted] keys: real ones up to start(i), predicted ones after.

    A verified position (i = start(i)) drafts nothing: it sees its past, and its output is not used.
    """
    column = torch.arange(start.shape[1], device=start.device)
    return Visible((Window(None, start + 1), Window(start + 1, column[None] + 1)))
