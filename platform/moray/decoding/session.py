"""One sequence's side of the target: its cache, its mask, and the passes over them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.errors import DataError
from moray.targets.model import Target, TargetOutput
from moray.trees.tree import PrefixMask, TokenTree

PREFILL_CHUNK = 256


class TargetSession:
    """Target, cache and mask for one sequence at a time, which are allocated here, once.

    After each pass the cache holds every token but the last emitted one, the root of the next pass.
    """

    def __init__(self, target: Target, capacity: int, max_nodes: int, is_timed: bool = False) -> None:
        """
        Args:
            target: shared by any number of sessions.
            capacity: most tokens of prompt and answer together.
            max_nodes: most nodes of a tree, root included.
            is_timed: `wait` waits for the device, so that phases can be told apart; it costs some overlap.
        """
        if capacity > target.spec.max_positions:
            raise DataError(
                f"a context of {capacity} tokens was asked for; the target's is {target.spec.max_positions}"
            )
        self.target = target
        self.capacity = capacity
        self.max_nodes = max_nodes
        self._needs = TapNeeds()
        self._is_timed = is_timed
        slots = capacity + max(max_nodes, 1)
        self.cache = target.new_cache(slots)
        self._mask = PrefixMask(max(max_nodes, PREFILL_CHUNK), slots + PREFILL_CHUNK, self.cache.data)
        self._positions = torch.arange(slots, device=target.device)
        self._lower = torch.ones(PREFILL_CHUNK, PREFILL_CHUNK, dtype=torch.bool, device=target.device).tril()
        self._output: TargetOutput | None = None
        self._num_taken = 0
        """Tokens in the cache whose taps have been handed over."""
        self._hidden: dict[int, list[Tensor]] = {}
        """Hidden states of the tokens behind them, by depth: the cache keeps none."""

    def begin(self, needs: TapNeeds) -> None:
        """A new sequence is to come, of which a drafter observes these taps."""
        self._needs = needs
        self._num_taken = 0
        self._hidden = {depth: [] for depth in needs.hidden_depths}
        self.cache.reset()
        self._mask.reset()

    @property
    def has_exact_phases(self) -> bool:
        """Whether what a phase took is known: on a CPU, and where `wait` waits."""
        return self._is_timed or self.target.device.type == "cpu"

    def wait(self) -> None:
        """Wait for the device if this session is timed."""
        if self._is_timed:
            synchronise(self.target.device)

    def prefill(
        self, prompt: list[int], on_chunk: Callable[[Int[Tensor, " new"], Taps], None] | None = None
    ) -> Float[Tensor, "1 vocab"]:
        """Read the prompt of a sequence; return the logits of its first generated token.

        `on_chunk` receives each chunk's tokens and taps, so that memory stays bounded.

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
        self._num_taken = len(prompt)
        assert output is not None
        return self.target.logits(output.last[0, -1:])

    def decode(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Plain decoding: one token in, the next one's logits out, its keys and values kept."""
        position = self.cache.length
        positions = self._positions[None, position : position + 1]
        output = self.target.forward(token[None], positions, None, self.cache)
        self._keep(1)
        return self.target.logits(output.last[0])

    def verify(self, tree: TokenTree) -> Float[Tensor, "nodes vocab"]:
        """Score every node of a tree in one pass; nothing is kept until `commit`."""
        self._output = self._pass(tree.tokens, tree.depths + self.cache.length, tree.ancestors)
        return self.target.logits(self._output.last[0])

    def commit(self, path: list[int]) -> None:
        """Keep the root and the accepted path, and drop the rest."""
        assert self._output is not None, "commit follows verify"
        kept = [0, *path]
        new = len(kept)
        rows: Tensor | slice = slice(0, new)
        if path and kept[-1] != new - 1:  # such a path already lies in order
            rows = torch.tensor(kept, device=self.target.device)
            self.cache.commit_path(rows)
        else:
            self.cache.commit(new)
        self._mask.commit(new)
        for depth, hidden in self._output.hidden.items():
            self._hidden[depth].append(hidden[:, rows])

    def take_taps(self, most: int) -> Taps:
        """The taps of the first tokens behind the prompt that have not been taken yet, at most so many of them.

        At least one must be left. Keys and values are read from the cache by this call, not when tokens are committed.
        """
        begin, end = self._num_taken, min(self._num_taken + most, self.cache.length)
        self._num_taken = end
        hidden = {}
        for depth, parts in self._hidden.items():
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            hidden[depth] = joined[:, : end - begin]
            parts[:] = [joined[:, end - begin :]] if end < self.cache.length else []
        return Taps(self._kv(begin, end), hidden)

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
    """Wait until a GPU has done all that was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
