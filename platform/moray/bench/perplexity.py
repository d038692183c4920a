"""How likely a text is under a target: the mean negative log-likelihood of its tokens, and its exponential."""

import math
from collections.abc import Sequence

import torch

from moray.targets.model import Target


@torch.inference_mode()
def token_losses(target: Target, context: Sequence[int], text: Sequence[int]) -> list[float]:
    """Negative log-likelihood of each token of a text, in nats, after the context and the tokens before it.

    Args:
        target: at temperature 1.
        context: tokens before the text; at least one.
        text: the tokens.
    """
    if not text:
        return []
    tokens = torch.tensor([[*context, *text]], device=target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    hidden = target.forward(tokens, positions, None, target.new_cache(tokens.shape[1])).last
    logits = target.logits(hidden[0, len(context) - 1 : -1]).float()
    return torch.nn.functional.cross_entropy(logits, tokens[0, len(context) :], reduction="none").tolist()


def perplexity(losses: Sequence[float]) -> float | None:
    """exp of the mean; None for no tokens."""
    return math.exp(sum(losses) / len(losses)) if losses else None
