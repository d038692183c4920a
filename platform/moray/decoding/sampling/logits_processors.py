"""Penalties and biases on one sequence's logits, applied at every node of a tree before a token is chosen.

At a node, the answer so far is what was emitted plus the path down to the node. So a penalty there is what it would be
if the path had been emitted, which makes it lossless.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from moray.decoding.request import Request
from moray.trees.tree import TokenTree


class LogitsProcessors:
    """What a request adds to the target's logits."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self._presence, self._frequency = request.presence_penalty, request.frequency_penalty
        self._counts = torch.zeros(vocab_size, device=device) if self._presence or self._frequency else None
        bias = torch.zeros(vocab_size, device=device) if request.logit_bias else None
        if bias is not None:
            ids = list(request.logit_bias)
            bias[torch.tensor(ids, device=device)] = torch.tensor(
                [float(request.logit_bias[token]) for token in ids], device=device
            )
        self._bias = bias

    @property
    def is_needed(self) -> bool:
        """Whether logits are changed at all."""
        return self._counts is not None or self._bias is not None

    def emit(self, tokens: Sequence[int]) -> None:
        """Record that tokens have been added to the answer."""
        if self._counts is not None and tokens:
            index = torch.tensor(tokens, device=self._counts.device)
            self._counts.index_add_(0, index, torch.ones_like(index, dtype=self._counts.dtype))

    def apply(self, logits: Float[Tensor, "nodes vocab"], tree: TokenTree | None) -> Float[Tensor, "nodes vocab"]:
        """Return the adjusted logits; the root of `tree` (None: a single node) is the last emitted token."""
        logits = logits.float()
        if self._bias is not None:
            logits = logits + self._bias
        if self._counts is None:
            return logits
        counts = self._counts.expand_as(logits)
        if tree is not None and tree.num_nodes > 1:
            below = tree.ancestors[:, 1:].to(counts.dtype)  # the root is counted already
            counts = counts.index_add(1, tree.tokens[1:], below)
        return logits - self._frequency * counts - self._presence * (counts > 0)


def adjust(
    logits: Float[Tensor, "rows nodes vocab"], processors: Sequence[LogitsProcessors], trees: Sequence[TokenTree]
) -> Float[Tensor, "rows nodes vocab"]:
    """Apply each sequence's penalties and biases to the logits of its tree; the logits themselves if there are none."""
    adjusted = [row for row, processor in enumerate(processors) if processor.is_needed]
    if adjusted:
        logits = logits.float().clone()
        for row in adjusted:
            nodes = trees[row].num_nodes
            logits[row, :nodes] = processors[row].apply(logits[row, :nodes], trees[row])
    return logits
