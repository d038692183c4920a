"""Many prompts at once, one token each per pass: plain greedy decoding for throughput, not for latency.

For making data, where nobody waits for a single answer. Sequences that have ended leave the batch once half
of it is idle.
"""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moray.errors import DataError
from moray.targets.kv_cache import KVCache
from moray.targets.model import Target


@torch.inference_mode()
def decode_lockstep(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Collection[int]
) -> list[list[int]]:
    """The greedy answers of the target, each up to and with its end-of-sequence token.

    Prompts are padded on the left to a common width, so that all sequences write the same slot; memory is
    that of len(prompts) x (longest prompt + max_new_tokens) cache slots.

    Raises:
        DataError: no prompts, an empty one, or one that leaves no room in the context.
    """
    width = max(map(len, prompts), default=0)
    if not width or not min(map(len, prompts)) or width >= target.spec.max_positions:
        raise DataError(f"prompts of 1 to {target.spec.max_positions - 1} tokens are needed; the longest has {width}")
    max_new_tokens = min(max_new_tokens, target.spec.max_positions - width)
    batch = _Batch(target, prompts, width, max_new_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        alive = []
        for row, token in enumerate(batch.tokens.tolist()):
            answer = answers[batch.owners[row]]
            if not answer or answer[-1] not in eos_ids:
                answer.append(token)
                if token not in eos_ids:
                    alive.append(row)
        if not alive:
            break
        if 2 * len(alive) <= len(batch.owners):
            batch.keep(alive)
        batch.step()
    return answers


class _Batch:
    """The running sequences: their cache, padding, visible slots and last tokens."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], width: int, max_new_tokens: int) -> None:
        device = target.device
        rows = len(prompts)
        self._target = target
        self.owners = list(range(rows))
        padded = torch.zeros(rows, width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, width - len(prompt) :] = torch.tensor(prompt)
        self._padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        slots = torch.arange(width + max_new_tokens, device=device)
        self._visible: Bool[Tensor, "batch slots"] = slots >= self._padding[:, None]
        self._cache: KVCache = target.new_cache(width + max_new_tokens, batch=rows)
        column = slots[:width]
        # Padding rows see themselves: a row of nothing but -inf would be NaN.
        mask = (column <= column[:, None]) & self._visible[:, None, :width] | (column == column[:, None])
        positions = (column - self._padding[:, None]).clamp(min=0)
        output = target.forward(padded.to(device), positions, mask[:, None], self._cache)
        self._cache.commit(width)
        self.tokens: Int[Tensor, " batch"] = target.logits(output.last[:, -1]).argmax(dim=-1)

    def step(self) -> None:
        """One more token for every sequence."""
        slot = self._cache.length
        positions = (slot - self._padding)[:, None]
        mask = self._visible[:, None, None, : slot + 1]
        output = self._target.forward(self.tokens[:, None], positions, mask, self._cache)
        self._cache.commit(1)
        self.tokens = self._target.logits(output.last[:, 0]).argmax(dim=-1)

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows."""
        index = torch.tensor(rows, device=self.tokens.device)
        self.owners = [self.owners[row] for row in rows]
        self._padding, self._visible, self.tokens = self._padding[index], self._visible[index], self.tokens[index]
        self._cache.data = self._cache.data.index_select(2, index)
