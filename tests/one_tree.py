"""Single trees, as the laws of drafting speak of them: one sequence's tree through the code that grows many."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moray.drafters.base import Drafter
from moray.trees.grow import Select, grow_many
from moray.trees.growth import SelectedTokens
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

Step = Callable[[Tensor, Tensor | None, int], Tensor | None]
"""step(tokens [new], ancestors [new, expanded] or None, depth) -> logits [new, vocab]; None ends the tree."""


def grow(root: Tensor, shape: GrowableShape, step: Step, select: Select) -> TokenTree:
    """Draft a tree of `shape` below `root` [1]."""
    return grow_many(root, shape, partial(_step_one, step), partial(_select_one, select))[0]


def propose(drafter: Drafter, state: Any, root: Tensor, shape: GrowableShape, select: Select) -> TokenTree:
    """A drafter's tree for one sequence."""
    return drafter.propose_many([state], root, shape, partial(_select_one, select))[0]


def _step_one(
    step: Step, asked: Sequence[int], tokens: Tensor, ancestors: Tensor | None, depth: int
) -> tuple[Sequence[int], Tensor]:
    logits = step(tokens[0], None if ancestors is None else ancestors[0], depth)
    return ((), torch.empty(0, 1, 1)) if logits is None else ((0,), logits[None])


def _select_one(select: Select, asked: Sequence[int], logits: Tensor, depth: int, children: int) -> SelectedTokens:
    tokens, log_probs, draft_probs = select(logits[0], depth, children)
    return SelectedTokens(tokens[None], log_probs[None], (draft_probs,))
