"""Scaled dot-product attention: over whole sequences, and from drafted nodes to the keys and values of their sequence.

A draft step computes the rows of several sequences together, concatenated. Only attention runs sequence by sequence,
because each sequence has its keys and values in its own buffers.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moray.targets.attention import attend_grouped
from moray.targets.kernels.attention import CompiledAttention
from moray.targets.visibility import Visible, attend_causally, attend_visible

KVBuffer = Float[Tensor, "2 1 kv_heads slots head_dim"]
"""Keys and values of one attention and one sequence, slot by slot (see `drafters.common.slots`)."""

Mask = Visible | Literal["causal"] | Float[Tensor, "#batch 1 seq slots"] | None
"""What queries see of keys. Training on whole sequences uses a rule ("causal" uses the kernel's own); drafting uses a
tensor that is 0 where they see; None: everything."""


class Reach(NamedTuple):
    """Where new rows of one sequence go in its buffer, and what they see of it."""

    cache: KVBuffer
    slot: int
    """Slot of the first row."""
    num_rows: int
    num_known: int = 0
    """For the first `num_known` rows only keys and values are needed; without a mask, the other rows see all of
    them."""
    mask: Float[Tensor, "1 1 rest seen"] | None = None


def attend(
    query: Float[Tensor, "batch heads seq head_dim"],
    key: Float[Tensor, "batch kv_heads slots head_dim"],
    value: Float[Tensor, "batch kv_heads slots head_dim"],
    mask: Mask,
    kernel: CompiledAttention | None = None,
) -> Float[Tensor, "batch seq width"]:
    """Scaled dot-product attention; returns the heads side by side. `kernel` is the one that computes few queries,
    if there is one."""
    if isinstance(mask, Visible):
        attended = attend_visible(query, key, value, mask)
    elif isinstance(mask, str):
        attended = attend_causally(query, key, value)
    else:
        attended = attend_grouped(query, key, value, mask, kernel=kernel)
    return attended.transpose(1, 2).flatten(2)


def attend_within(
    query: Float[Tensor, "1 heads rows head_dim"],
    key: Float[Tensor, "1 kv_heads rows head_dim"],
    value: Float[Tensor, "1 kv_heads rows head_dim"],
    reaches: Sequence[Reach],
    kernel: CompiledAttention | None = None,
) -> Float[Tensor, "1 rest width"]:
    """Attention of each row to its own sequence, for rows of several sequences. Their keys and values are first written
    to the buffers."""
    sizes, attended = [reach.num_rows for reach in reaches], []
    parts = zip(reaches, _cut(query, sizes, 2), _cut(key, sizes, 2), _cut(value, sizes, 2), strict=True)
    for (cache, slot, num_rows, num_known, mask), own_query, own_key, own_value in parts:
        end = slot + num_rows
        cache[0, :, :, slot:end] = own_key
        cache[1, :, :, slot:end] = own_value
        seen_key, seen_value = cache[..., :end, :]
        asking = own_query[:, :, num_known:] if num_known else own_query
        attended.append(attend(asking, seen_key, seen_value, mask, kernel))
    return _joined(attended)


def attend_each(
    query: Float[Tensor, "1 heads rows head_dim"],
    memories: Sequence[Float[Tensor, "2 1 kv_heads _ head_dim"]],
    kernel: CompiledAttention | None = None,
) -> Float[Tensor, "1 rows width"]:
    """Attention of rows of several sequences, the same number for each, to all keys and values in the sequence's
    memory."""
    queries = _cut(query, [query.shape[2] // len(memories)] * len(memories), 2)
    parts = zip(queries, memories, strict=True)
    return _joined([attend(own, memory[0], memory[1], None, kernel) for own, memory in parts])


def without_known(x: Float[Tensor, "1 rows width"], reaches: Sequence[Reach]) -> Float[Tensor, "1 rest width"]:
    """Drop the known rows from a tensor with the rows of several sequences."""
    if not any(reach.num_known for reach in reaches):
        return x
    parts = _cut(x, [reach.num_rows for reach in reaches], 1)
    return _joined([part[:, reach.num_known :] for part, reach in zip(parts, reaches, strict=True)])


def _cut(x: Float[Tensor, "*any"], sizes: list[int], dim: int) -> Sequence[Float[Tensor, "*_"]]:
    return (x,) if len(sizes) == 1 else x.split(sizes, dim)


def _joined(parts: list[Float[Tensor, "1 _ width"]]) -> Float[Tensor, "1 rows width"]:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
