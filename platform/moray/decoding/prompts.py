"""Reading prompts of different lengths together, before their answers are decoded together.

This module knows the target alone: what is done with keys, values and taps is for its callers.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target

PREFILL_TOKENS = 4096
"""Prompts that are read together have at most so many slots, if they are more than one."""
PREFILL_CHUNK = 256
_ADMIT_SHARE = 16
"""A pass over new prompts costs about as much as one over all running sequences, so it waits until a 16th of
them has ended."""

OnChunk = Callable[[int, Int[Tensor, "prompts new"], Taps], None]
"""on_chunk(begin, tokens, taps): all prompts' tokens from position `begin` on, padding included, and their taps."""


def is_worth_a_pass(num_new: int, num_running: int, num_waiting: int) -> bool:
    """Whether the `num_new` of `num_waiting` prompts that could begin are enough to keep `num_running` waiting."""
    return num_new > 0 and num_new >= min(num_running // _ADMIT_SHARE, num_waiting)


def read_together(
    target: Target, prompts: Sequence[list[int]], needs: TapNeeds | None = None, on_chunk: OnChunk | None = None
) -> tuple[KVCache, Float[Tensor, "prompts hidden"], Int[Tensor, " prompts"]]:
    """Read prompts, padded on the right; returns their keys and values, what follows each, and their lengths.

    The mask is the causal one for all: a prompt comes before its own padding, which nothing may look at later. The
    second result is the last hidden state (after the final norm) of each prompt's last token.

    Args:
        target: may be shared.
        prompts: none is empty.
        needs: taps for `on_chunk`.
        on_chunk: receives chunk after chunk, so that what is made of taps needs little memory.
    """
    needs, device = needs or TapNeeds(), target.device
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = target.new_cache(longest, batch=len(prompts))
    slots = torch.arange(longest, device=device)
    last: Tensor | None = None
    for begin in range(0, longest, PREFILL_CHUNK):
        chunk = slots[begin : begin + PREFILL_CHUNK]
        count = chunk.shape[0]
        tokens = padded[:, begin : begin + count]
        mask = (slots[: begin + count] <= chunk[:, None])[None, None]
        output = target.forward(tokens, chunk.expand(len(prompts), -1), mask, cache, needs.hidden_depths)
        cache.commit(count)
        if on_chunk is not None:
            kv = cache.flat(begin, begin + count, needs.kv_layers) if needs.kv_layers else None
            on_chunk(begin, tokens, Taps(kv, output.hidden))
        at = (lengths - 1 - begin).clamp(0, count - 1)
        here = output.last[torch.arange(len(prompts), device=device), at]
        # Chunks before a prompt's last one are overwritten, those behind it must not count.
        last = here if last is None else torch.where((lengths > begin)[:, None], here, last)
    assert last is not None
    return cache, last, lengths
