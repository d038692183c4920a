"""Grows token trees level by level with any drafter that can score the children of given nodes.

This module knows neither models nor sampling: a `Step` scores, a `Select` picks children from the scores. Trees of
several sequences grow side by side, so that a drafter can score the nodes of all of them at once, level by level.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.trees.growth import Picked, begin, structure_below
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

Step = Callable[[Int[Tensor, " new"], Bool[Tensor, "new expanded"] | None, int], Float[Tensor, "new vocab"] | None]
"""step(tokens, ancestors, depth) -> logits for the children of each node; None ends the tree here.

`ancestors` says which of all nodes expanded so far (these included, in order) each new node descends from, itself
included; None if every new node sees all of them (a chain). At depth 0 there is only the root.
"""

Select = Callable[
    [Float[Tensor, "new vocab"], int, int],
    tuple[Int[Tensor, "new children"], Float[Tensor, "new children"], Float[Tensor, "new vocab"] | None],
]
"""select(logits, depth, k) -> k child tokens per node, best first; their log-probabilities; and the
distribution they were sampled from, or None for deterministic proposals."""

StepMany = Callable[
    [Sequence[int], Int[Tensor, "asked new"], Bool[Tensor, "#asked new expanded"] | None, int],
    tuple[Sequence[int], Float[Tensor, "left new vocab"]],
]
"""step(asked, tokens, ancestors, depth) -> which of the asked sequences (counted from 0) go on, ascending, and their
logits; the trees of the others end here. `asked` are sequence numbers; for the rest see `Step`."""

SelectMany = Callable[[Sequence[int], Float[Tensor, "asked new vocab"], int, int], Picked]
"""select(asked, logits, depth, k): a `Select` for several sequences, given by number."""


def grow(root: Int[Tensor, " 1"], shape: GrowableShape, step: Step, select: Select) -> TokenTree:
    """Draft a tree of `shape` below `root`. Nothing waits for the device."""
    return grow_many(root, shape, partial(_step_alone, step), alone(select))[0]


def _step_alone(
    step: Step, asked: Sequence[int], tokens: Tensor, ancestors: Tensor | None, depth: int
) -> tuple[Sequence[int], Tensor]:
    logits = step(tokens[0], None if ancestors is None else ancestors[0], depth)
    return ((), torch.empty(0, 1, 1)) if logits is None else ((0,), logits[None])


def grow_many(
    roots: Int[Tensor, " sequences"], shape: GrowableShape, step: StepMany, select: SelectMany
) -> list[TokenTree]:
    """Draft a tree of `shape` below every root, each as `grow` would draft it alone."""
    growth = begin(roots, shape)
    going = list(range(roots.shape[0]))
    trees: dict[int, TokenTree] = {}
    for depth in range(shape.depth):
        left, logits = step(going, *growth.frontier(), depth)
        if len(left) < len(going):
            ended = [place for place in range(len(going)) if place not in left]
            trees |= zip([going[place] for place in ended], growth.only(ended).trees(), strict=True)
            growth, going = growth.only(left), [going[place] for place in left]
        if not going:
            break
        growth.add(select(going, logits, depth, growth.num_children))
    if going:
        trees |= zip(going, growth.trees(), strict=True)
    return [trees[number] for number in range(roots.shape[0])]


def alone(select: Select) -> SelectMany:
    """Turn a `Select` into one for a single sequence of a batch."""
    return partial(_select_alone, select)


def _select_alone(select: Select, asked: Sequence[int], logits: Tensor, depth: int, children: int) -> Picked:
    tokens, log_probs, draft_probs = select(logits[0], depth, children)
    return Picked(tokens[None], log_probs[None], (draft_probs,))


def root_alone(root: Int[Tensor, " 1"]) -> TokenTree:
    """The tree without a draft: verifying it is a plain decoding step."""
    structure = structure_below((), root.device)
    return TokenTree(root, structure.parents, structure.depths, structure.ancestors, 0)
