"""Explains where an answer with drafts parts from plain decoding of the same sparse target.

Both compute the same, but in passes over other numbers of tokens, whose sums differ in the last bits. That decides a
token only at a tie: between the two likeliest tokens, or in a router, between running a layer and skipping it. A first
difference without a tie before it is a defect.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moray.targets.sparse.target import SparseTarget

LOGIT_TIE = 1e-3
"""The two likeliest tokens tie if their logits differ by less."""
ROUTER_TIE = 4e-4
"""A router ties if its logits for running and skipping differ by less: its probability is then within 1e-4 of 0.5."""


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers."""

    token: int
    """Its place in the answers."""
    logit_margin: float
    """Difference of the two largest logits there."""
    router_margin: float
    """Smallest difference of a router's logits over all layers and all tokens up to there."""

    @property
    def is_tie(self) -> bool:
        """Whether float noise explains it."""
        return self.logit_margin < LOGIT_TIE or self.router_margin < ROUTER_TIE


@torch.inference_mode()
def first_divergence(
    target: SparseTarget, prompt: Sequence[int], answer: Sequence[int], plain: Sequence[int]
) -> Divergence:
    """Look at the first difference of two answers, with one pass over the text before it.

    Args:
        target: that gave both.
        prompt: of both.
        answer: with drafts.
        plain: without; differs from `answer`.
    """
    at = next(
        (place for place, (one, other) in enumerate(zip(answer, plain, strict=False)) if one != other),
        min(len(answer), len(plain)),
    )
    tokens = torch.tensor([[*prompt, *plain[:at]]], device=target.device)
    length, num_layers = tokens.shape[1], target.spec.num_layers
    depths = {layer: layer - num_layers - 1 for layer in target.routers}
    positions = torch.arange(length, device=target.device)[None]
    output = target.forward(tokens, positions, None, target.new_cache(length), [*depths.values()])
    best, second = target.logits(output.last[0, -1]).topk(2).values.tolist()
    margins = [
        float(router.margin(output.hidden[depths[layer]][0]).abs().min()) for layer, router in target.routers.items()
    ]
    return Divergence(at, best - second, min(margins))
