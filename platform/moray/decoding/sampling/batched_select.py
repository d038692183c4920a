"""Picks the children of several sequences' trees at once, with the same result as `sampling.Sampler` for each alone.

Greedy sequences, which are most of the traffic, share one call over all of their rows. Sampled ones have their own
filters and noise and are handled one by one. Nothing waits for the device.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from moray.decoding.sampling.sampler import Sampler
from moray.trees.grow import Select, SelectMany
from moray.trees.growth import SelectedTokens
from moray.trees.shapes import ChainShape, GrowableShape


def picks_of(
    samplers: Sequence[Sampler], root_positions: Sequence[int], shape: GrowableShape, *, are_certain: bool = False
) -> SelectMany:
    """How trees of one shape, whose roots are at these positions, pick their children.

    With `are_certain` nothing is sampled from the drafter, not even a chain that will be tested by rejection: for
    callers that do not pass on the distributions that tokens are sampled from.
    """
    is_chain = isinstance(shape, ChainShape)
    selects = [
        sampler.selector(
            position, shape.depth, is_chain and not (are_certain and sampler.params.acceptance_method == "rejection")
        )
        for sampler, position in zip(samplers, root_positions, strict=True)
    ]
    return partial(_pick, samplers, selects)


def _pick(
    samplers: Sequence[Sampler],
    selects: Sequence[Select],
    asked: Sequence[int],
    logits: Float[Tensor, "asked new vocab"],
    depth: int,
    children: int,
) -> SelectedTokens:
    greedy = [index for index, number in enumerate(asked) if samplers[number].params.is_greedy]
    if len(greedy) == len(asked):
        tokens, log_probs, _ = selects[asked[0]](logits.flatten(0, 1), depth, children)
        size = logits.shape[:2]
        return SelectedTokens(tokens.unflatten(0, size), log_probs.unflatten(0, size), [None] * len(asked))
    found = {}
    if len(greedy) > 1:
        together = _pick(
            samplers, selects, [asked[p] for p in greedy], torch.stack([logits[p] for p in greedy]), depth, children
        )
        found = dict(zip(greedy, zip(*together, strict=True), strict=True))
    for index, number in enumerate(asked):
        if index not in found:
            found[index] = selects[number](logits[index], depth, children)
    every = [found[index] for index in range(len(asked))]
    tokens, log_probs, draft_probs = zip(*every, strict=True)
    return SelectedTokens(torch.stack(tokens), torch.stack(log_probs), draft_probs)
