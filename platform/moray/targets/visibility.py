"""What queries of whole training sequences may see, as a rule instead of a [seq, seq] mask.

Attention runs over blocks of queries, each with the keys up to the end of the block and a mask that is created on the
fly, and again for the backward pass. For a given number of tokens, memory does not grow with the length of the
sequences, and the half of the products that a causal mask would discard is not computed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_QUERY_BLOCK = 512
"""Queries that attend together. A shorter sequence is one block, for which nothing is recomputed."""


@dataclass(frozen=True)
class Window:
    """What queries see of one run of keys, as long as the sequence: key j if first(i) <= j < end(i)."""

    first: Int[Tensor, "#batch seq"] | None
    """None: from the first key on."""
    end: Int[Tensor, "#batch seq"]
    """At most i + 1: no query ever sees keys after its own position."""


@dataclass(frozen=True)
class Visible:
    """What query i of each sequence sees: keys are arranged in consecutive runs, and it sees one window of each run.

    Every query sees at least one key.
    """

    windows: tuple[Window, ...]

    def within(self, size: int) -> "Visible":
        """The same rule, limited to the last `size` keys of every run, including the query's own: a sliding window."""
        windows = []
        for window in self.windows:
            nearest = (torch.arange(window.end.shape[1], device=window.end.device) + 1 - size).clamp(min=0)[None]
            first = nearest if window.first is None else torch.maximum(window.first, nearest)
            windows.append(Window(first, window.end))
        return Visible(tuple(windows))

    def rows(self, begin: int, end: int) -> Bool[Tensor, "#batch 1 queries keys"]:
        """The mask of queries begin..end-1 over the first `end` keys of every run: True if the query sees the key."""
        column = torch.arange(end, device=self.windows[0].end.device)
        masks = []
        for window in self.windows:
            seen = column < window.end[:, begin:end, None]
            masks.append(seen if window.first is None else seen & (column >= window.first[:, begin:end, None]))
        return (masks[0] if len(masks) == 1 else torch.cat(masks, dim=2))[:, None]

    def keys(
        self, runs: Float[Tensor, "batch kv_heads slots head_dim"], end: int
    ) -> Float[Tensor, "batch kv_heads keys head_dim"]:
        """The first `end` keys, or values, of every run."""
        count = len(self.windows)
        seq = runs.shape[2] // count
        if end == seq:
            return runs
        parts = [runs[:, :, run * seq : run * seq + end] for run in range(count)]
        return parts[0] if count == 1 else torch.cat(parts, dim=2)


def attend_visible(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads slots head_dim"],
    value: Float[Tensor, "batch kv_heads slots head_dim"],
    visible: Visible,
    scale: float | None = None,
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Scaled dot-product attention of whole sequences to what they may see."""
    seq = query.shape[2]
    if seq <= _QUERY_BLOCK:
        return _attend_block(query, key, value, visible, 0, scale)
    blocks = []
    for begin in range(0, seq, _QUERY_BLOCK):
        rows = query[:, :, begin : begin + _QUERY_BLOCK]
        # Only views of the inputs are kept for the backward pass; mask and copies of keys are recreated.
        blocks.append(
            checkpoint(
                _attend_block, rows, key, value, visible, begin, scale, use_reentrant=False, preserve_rng_state=False
            )
        )
    return torch.cat(blocks, dim=2)


def attend_causally(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads seq head_dim"],
    value: Float[Tensor, "batch kv_heads seq head_dim"],
) -> Float[Tensor, "batch heads seq head_dim"]:
    """The same if every query sees all keys up to its own: the kernel implements this rule itself."""
    if query.is_cuda and query.dtype == torch.float32:  # the fused kernel for grouped heads is half precision only
        key, value = _repeat(key, query), _repeat(value, query)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])


def _attend_block(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads slots head_dim"],
    value: Float[Tensor, "batch kv_heads slots head_dim"],
    visible: Visible,
    begin: int,
    scale: float | None,
) -> Float[Tensor, "batch heads queries head_dim"]:
    end = begin + query.shape[2]
    key, value = visible.keys(key, end), visible.keys(value, end)
    if query.is_cuda:  # its fused kernels take masks or grouped heads, not both; unfused ones store all scores
        key, value = _repeat(key, query), _repeat(value, query)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible.rows(begin, end),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _repeat(
    x: Float[Tensor, "batch kv_heads slots head_dim"], query: Float[Tensor, "batch heads queries head_dim"]
) -> Float[Tensor, "batch heads slots head_dim"]:
    """Repeat each key/value head for all query heads that read it."""
    group = query.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)
