"""Grows token trees level by level with any drafter that can score the children of given nodes.

This module knows neither models nor sampling: a `StepMany` scores, a `SelectMany` picks children from the scores. Trees
of several sequences grow side by side, so that a drafter can score the nodes of all of them at once, level by level.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.trees.growth import SelectedTokens, begin, structure_below
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

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
"""step(asked, tokens, ancestors, depth) -> which of the asked sequences (counted from 0) go on, ascending, and the
logits for the children of each of their nodes; the trees of the others end here.

`asked` are sequence numbers. `ancestors` says which of all nodes expanded so far (these included, in order) each new
node descends from, itself included; None if every new node sees all of them (a chain). At depth 0 there is only the
root.
"""

SelectMany = Callable[[Sequence[int], Float[Tensor, "asked new vocab"], int, int], SelectedTokens]
"""select(asked, logits, depth, k): a `Select` for several sequences, given by number."""


def grow_many(
    roots: Int[Tensor, " sequences"], shape: GrowableShape, step: StepMany, select: SelectMany
) -> list[TokenTree]:
    """Draft a tree of `shape` below every root, each the same as if it were drafted alone. Nothing waits for the
    device."""
    growth = begin(roots, shape)
    going = list(range(roots.shape[0]))
    trees: dict[int, TokenTree] = {}
    for depth in range(shape.depth):
        left, logits = step(going, *growth.frontier(), depth)
        if len(left) < len(going):
            ended = [index for index in range(len(going)) if index not in left]
            trees |= zip([going[index] for index in ended], growth.only(ended).trees(), strict=True)
            growth, going = growth.only(left), [going[index] for index in left]
        if not going:
            break
        growth.add(select(going, logits, depth, growth.num_children))
    if going:
        trees |= zip(going, growth.trees(), strict=True)
    return [trees[number] for number in range(roots.shape[0])]


def root_alone(root: Int[Tensor, " 1"]) -> TokenTree:
    """The tree without a draft: verifying it is a plain decoding step."""
    structure = structure_below((), root.device)
    return TokenTree(root, structure.parents, structure.depths, structure.ancestors, 0)
