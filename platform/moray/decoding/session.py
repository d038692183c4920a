"""One sequence with the target and no drafts: its cache, its mask, and the passes over them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.errors import DataError
from moray.targets.model import Target, TargetOutput
from moray.trees.tree import PrefixMask

PREFILL_CHUNK = 256


class TargetSession:
    """Target, cache and mask for one sequence at a time; all memory is allocated once, at the start."""

    def __init__(self, target: Target, capacity: int) -> None:
        """
        Args:
            target: shared by any number of sessions.
            capacity: maximum number of tokens of prompt and answer together.
        """
        if capacity > target.spec.max_positions:
            raise DataError(
                f"a context of {capacity} tokens was asked for; the target's is {target.spec.max_positions}"
            )
        self.target = target
        self.capacity = capacity
        self._needs = TapNeeds()
        slots = capacity + 1
        self.cache = target.new_cache(slots)
        self._mask = PrefixMask(PREFILL_CHUNK, slots + PREFILL_CHUNK, self.cache.data)
        self._positions = torch.arange(slots, device=target.device)
        self._lower = torch.ones(PREFILL_CHUNK, PREFILL_CHUNK, dtype=torch.bool, device=target.device).tril()

    def begin(self, needs: TapNeeds) -> None:
        """Start a new sequence, of which a drafter observes these taps."""
        self._needs = needs
        self.cache.reset()
        self._mask.reset()

    def prefill(
        self, prompt: list[int], on_chunk: Callable[[Int[Tensor, " new"], Taps], None] | None = None
    ) -> Float[Tensor, "1 vocab"]:
        """Read the prompt of a sequence; return the logits of its first generated token.

        `on_chunk` receives the tokens and taps of each chunk, so that memory stays bounded.

        Raises:
            DataError: the prompt is empty or leaves no room in the context.
        """
        if not 0 < len(prompt) < self.capacity:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; this context of {self.capacity} takes 1 to {self.capacity - 1}"
            )
        tokens = torch.tensor(prompt, device=self.target.device)
        output: TargetOutput | None = None
        for begin in range(0, len(prompt), PREFILL_CHUNK):
            chunk = tokens[begin : begin + PREFILL_CHUNK]
            new = chunk.shape[0]
            output = self._pass(chunk, self._positions[begin : begin + new], self._lower[:new, :new])
            self._keep(new)
            if on_chunk is not None:
                on_chunk(chunk, Taps(self._kv(begin, begin + new), output.hidden))
        assert output is not None
        return self.target.logits(output.last[0, -1:])

    def decode(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Decode one step: take one token, keep its keys and values, and return the logits of the next token."""
        position = self.cache.length
        positions = self._positions[None, position : position + 1]
        output = self.target.forward(token[None], positions, None, self.cache)
        self._keep(1)
        return self.target.logits(output.last[0])

    def _pass(self, tokens: Int[Tensor, " new"], positions: Int[Tensor, " new"], block: Tensor) -> TargetOutput:
        mask = None if tokens.shape[0] == 1 else self._mask.view(block)  # a single token sees all before it, and itself
        return self.target.forward(tokens[None], positions[None], mask, self.cache, self._needs.hidden_depths)

    def _keep(self, num_tokens: int) -> None:
        self.cache.commit(num_tokens)
        self._mask.commit(num_tokens)

    def _kv(self, begin: int, end: int) -> Float[Tensor, "1 seq layers width"] | None:
        layers = self._needs.kv_layers
        return self.cache.flat(begin, end, layers) if layers else None


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
