"""The target's passes over many sequences, one row each: reading prompts, verifying trees, committing.

This module deals with tokens, positions and slots; sequences and drafters are the engine's concern.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moray.decoding.engine.kv_cache import GRAIN, BatchedKVCache
from moray.decoding.engine.node_selection import NodeSelector
from moray.decoding.engine.sparse_kv_cache import SparseBatchedKVCache, SparseSingleKVCache
from moray.targets.model import Target, TargetOutput
from moray.targets.sparse.target import Selection, SparseTarget
from moray.trees.stack import stack_trees
from moray.trees.tree import TokenTree

_SEEN_GRAIN = 16
"""A pass attends to a multiple of this many slots: this gives few different shapes, and aligned ones."""


class TargetRunner:
    """A target and its `BatchedKVCache`."""

    def __init__(self, target: Target, num_slots: int, max_rows: int | None = None) -> None:
        """
        Args:
            target: may be shared.
            num_slots: size of the cache over all rows; rounded up.
            max_rows: maximum number of rows; None for as many as fit. With 1, skipped tokens take no memory in a sparse
                target's layers.
        """
        kind = BatchedKVCache
        if target.spec.routing is not None:
            kind = SparseSingleKVCache if max_rows == 1 else SparseBatchedKVCache
        self.cache: BatchedKVCache = target.make_cache(kind, -(-num_slots // GRAIN) * GRAIN)
        self.pass_seconds: dict[tuple[int, int], float] = {}
        """Measured seconds of this target's passes, by rows and by nodes of a row's tree, root included: decoders that
        share a runner measure them once (see `decoding.planning.measuring`)."""
        self._target = target
        self._dtype = target.model.lm_head.weight.dtype
        """Dtype of masks: attention kernels take additive masks as they are, but would convert booleans in every
        layer."""

    def read(
        self,
        first_row: int,
        tokens: Sequence[Sequence[int]],
        begins: Sequence[int],
        hidden_depths: Sequence[int] = (),
    ) -> TargetOutput:
        """Read the next tokens of prompts in consecutive rows, whose slots begin at `begins`.

        Shorter rows are padded. The padding is written after the prompt, in slots that are overwritten before they are
        read.
        """
        ids = self.to_device(tokens)
        new, device = ids.shape[1], ids.device
        if len(tokens) == 1:
            begin = begins[0]
            positions = torch.arange(begin, begin + new, device=device)
            block = None if begin == 0 else torch.ones(new, new, dtype=torch.bool, device=device).tril()
            return self._pass_of_one(first_row, begin, ids, positions, block, hidden_depths)
        positions = self.to_device([[begin] for begin in begins]) + torch.arange(new, device=device)
        num_seen = self._num_seen(max(begins) + new)
        mask = (torch.arange(num_seen, device=device) <= positions[..., None])[:, None]
        # Padding past a row's end shares its last slot, so it has to share its position too.
        positions = positions.clamp(max=min(self.cache.width, self._target.spec.max_positions) - 1)
        return self._pass(first_row, begins, ids, positions, mask, num_seen, hidden_depths)

    def verify(
        self,
        first_row: int,
        lengths: Sequence[int],
        trees: Sequence[TokenTree],
        hidden_depths: Sequence[int] = (),
        selector: NodeSelector | None = None,
    ) -> TargetOutput:
        """Run one pass over the trees of consecutive rows, padding smaller trees. A row's nodes follow its committed
        slots, of which there are `lengths`.

            slots of row 0   a  b  c  d | root x  y  .          its nodes see a to d, and their ancestors
            slots of row 1   e  f | root z  w  v  .  .          padding sees only itself, and no node sees it

        `selector` drops nodes of a single tree on the way.
        """
        if len(trees) == 1:
            (tree,), (length,) = trees, lengths
            positions = tree.depths + length
            chosen = None
            if selector is not None and tree.num_nodes > 1:
                chosen = Selection(selector.layer, partial(selector.choose, tree))
            tokens, seen = tree.tokens[None], tree.ancestors
            return self._pass_of_one(first_row, length, tokens, positions, seen, hidden_depths, chosen)
        stack = stack_trees(trees)
        num_nodes = stack.num_nodes
        begins = self.to_device([[length] for length in lengths])
        num_seen = self._num_seen(max(lengths) + num_nodes)
        mask = _tree_mask(begins, stack.ancestors, num_seen)
        return self._pass(first_row, lengths, stack.tokens, begins + stack.depths, mask, num_seen, hidden_depths)

    def _pass_of_one(
        self,
        row: int,
        begin: int,
        tokens: Int[Tensor, "1 new"],
        positions: Int[Tensor, " new"],
        block: Bool[Tensor, "new new"] | None,
        hidden_depths: Sequence[int],
        selection: Selection | None = None,
    ) -> TargetOutput:
        """A pass over new tokens of one row. They see all `begin` committed slots and, among themselves, what `block`
        allows; without `block`, each token sees those before it."""
        new = tokens.shape[1]
        mask = None
        if new > 1 and block is not None:
            mask = torch.zeros(1, 1, new, begin + new, dtype=self._dtype, device=tokens.device)
            mask[..., begin:].masked_fill_(~block, -torch.inf)
        self.cache.aim([begin], new, begin + new, row)
        if selection is not None:
            assert isinstance(self._target, SparseTarget)
            return self._target.forward(tokens, positions[None], mask, self.cache, hidden_depths, selection)
        return self._target.forward(tokens, positions[None], mask, self.cache, hidden_depths)

    def _pass(
        self,
        first_row: int,
        begins: Sequence[int],
        tokens: Int[Tensor, "rows new"],
        positions: Int[Tensor, "rows new"],
        seen: Bool[Tensor, "rows 1 new slots"],
        num_seen: int,
        hidden_depths: Sequence[int],
    ) -> TargetOutput:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        self.cache.aim(begins, tokens.shape[1], num_seen, first_row)
        return self._target.forward(tokens, positions, mask, self.cache, hidden_depths)

    def keep(self, first_row: int, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted paths (nodes below the root) of consecutive rows to the slots right after their roots."""
        moved = [row for row, path in enumerate(paths) if path and path[-1] != len(path)]
        if not moved:
            return
        longest = 1 + max(len(paths[row]) for row in moved)
        # Slots after a path keep their contents: they are overwritten before they are read.
        nodes = [[0, *paths[row], *range(1 + len(paths[row]), longest)] for row in moved]
        self.cache.move([first_row + row for row in moved], [lengths[row] for row in moved], nodes)

    def path_index(self, path: Sequence[int]) -> slice | Int[Tensor, " kept"]:
        """The root and a path below it, as an index into the tree's nodes."""
        if not path or path[-1] == len(path):
            return slice(0, 1 + len(path))
        return torch.tensor([0, *path], device=self._target.device)

    def to_device(self, rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows longest"]:
        """Copy numbers from the host, padding shorter rows with zeros."""
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self._target.device)

    def _num_seen(self, num_slots: int) -> int:
        return min(-(-num_slots // _SEEN_GRAIN) * _SEEN_GRAIN, self.cache.width)


def _tree_mask(
    begins: Int[Tensor, "rows 1"], ancestors: Bool[Tensor, "rows nodes nodes"], num_seen: int
) -> Bool[Tensor, "rows 1 nodes slots"]:
    rows, nodes, _ = ancestors.shape
    columns = torch.arange(num_seen, device=begins.device)
    if nodes == 1:
        return (columns <= begins)[:, None, None]
    committed = (columns < begins)[:, None].repeat(1, nodes, 1)
    slots = begins + torch.arange(nodes, device=begins.device)
    return committed.scatter_(2, slots[:, None].expand(rows, nodes, nodes), ancestors)[:, None]
