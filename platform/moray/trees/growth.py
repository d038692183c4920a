"""How trees of each shape grow, level by level, for several sequences side by side: which nodes are expanded next, what
happens to the picked children, and what the final trees are.

This module knows neither drafters nor sampling (see `trees.grow`), and never waits for the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.trees.ranking import at_most, keep_best
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape, GrowableShape, SparseShape
from moray.trees.tree import Structure, TokenTree, fixed_structure, structure_of


class SelectedTokens(NamedTuple):
    """Children of expanded nodes, the same number for each node."""

    tokens: Int[Tensor, "sequences new children"]
    log_probs: Float[Tensor, "sequences new children"]
    draft_probs: Sequence[Float[Tensor, "new vocab"] | None]
    """For each sequence, the distributions that the children were sampled from, or None for deterministic proposals."""


class Frontier(NamedTuple):
    """The nodes to expand next."""

    tokens: Int[Tensor, "sequences new"]
    ancestors: Bool[Tensor, "#sequences new expanded"] | None
    """See `trees.grow.StepMany`."""


class Growth(ABC):
    """Trees of one shape, one per sequence, grown so far."""

    def __init__(self, roots: Int[Tensor, " sequences"]) -> None:
        self._levels = [roots[:, None]]  # tokens [sequences, nodes of that level]

    @property
    def num_levels(self) -> int:
        """Levels grown below the roots."""
        return len(self._levels) - 1

    @property
    @abstractmethod
    def num_children(self) -> int:
        """How many children to pick for each expanded node."""

    @abstractmethod
    def frontier(self) -> Frontier:
        """What to expand next."""

    @abstractmethod
    def add(self, picked: SelectedTokens) -> None:
        """Grow a level from the picked children of the frontier."""

    @abstractmethod
    def trees(self) -> list[TokenTree]:
        """The trees of all sequences."""

    def only(self, places: Sequence[int]) -> "Growth":
        """The trees of some of the sequences only."""
        some = copy(self)
        some._keep(list(places))
        return some

    def _keep(self, places: list[int]) -> None:
        self._levels = [level[places] for level in self._levels]


def begin(roots: Int[Tensor, " sequences"], shape: GrowableShape) -> Growth:
    """Start trees that consist of their roots."""
    if isinstance(shape, DynamicShape):
        return _DynamicGrowth(roots, shape)
    if isinstance(shape, SparseShape):
        return _SparseGrowth(roots, shape)
    return _FixedGrowth(roots, shape)


class _FixedGrowth(Growth):
    """Chains, and trees in which all nodes of a level have the same number of children."""

    def __init__(self, roots: Int[Tensor, " sequences"], shape: ChainShape | FixedShape) -> None:
        super().__init__(roots)
        self._branching = (1,) * shape.depth if isinstance(shape, ChainShape) else shape.branching
        self._structure = structure_below(self._branching, roots.device)
        self._end = 1  # nodes so far
        self._probs: list[list[Float[Tensor, "nodes vocab"]]] = [[] for _ in roots]

    @property
    def num_children(self) -> int:
        return self._branching[self.num_levels]

    def frontier(self) -> Frontier:
        last = self._levels[-1]
        is_chain = self._end == self.num_levels + 1
        rows = slice(self._end - last.shape[1], self._end)
        return Frontier(last, None if is_chain else self._structure.ancestors[None, rows, : self._end])

    def add(self, picked: SelectedTokens) -> None:
        width = self.num_children
        for own, probs in zip(self._probs, picked.draft_probs, strict=True):
            if probs is not None:
                own.append(probs.repeat_interleave(width, dim=0))
        self._levels.append(picked.tokens.flatten(1))
        self._end += self._levels[-1].shape[1]

    def _keep(self, places: list[int]) -> None:
        super()._keep(places)
        self._probs = [self._probs[place] for place in places]

    def trees(self) -> list[TokenTree]:
        levels, structure = self.num_levels, self._structure
        if levels < len(self._branching):
            structure = structure.first(self._end)
        is_chain = self._end == levels + 1
        return [
            # The root was not drafted, so its row of draft_probs is never read.
            _tree(tokens, structure, levels, torch.cat([probs[0][:1], *probs]) if probs else None, is_chain)
            for tokens, probs in zip(torch.cat(self._levels, dim=1), self._probs, strict=True)
        ]


class _SparseGrowth(Growth):
    """Keeps only the named ranks of each node's children, and expands only nodes that have children."""

    def __init__(self, roots: Int[Tensor, " sequences"], shape: SparseShape) -> None:
        super().__init__(roots)
        self._structure, self._plan = _sparse_plan(shape.paths, roots.device)

    @property
    def num_children(self) -> int:
        return self._plan[self.num_levels].num_ranks

    def frontier(self) -> Frontier:
        depth, last = self.num_levels, self._levels[-1]
        expanding = last if depth == 0 else last[:, self._plan[depth - 1].expanding]
        ancestors = self._plan[depth].ancestors
        return Frontier(expanding, None if ancestors is None else ancestors[None])

    def add(self, picked: SelectedTokens) -> None:
        level = self._plan[self.num_levels]
        self._levels.append(picked.tokens[:, level.parents, level.ranks])

    def trees(self) -> list[TokenTree]:
        tokens = torch.cat(self._levels, dim=1)
        structure = self._structure.first(tokens.shape[1])
        return [_tree(own, structure, self.num_levels) for own in tokens]


@dataclass(frozen=True)
class _SparseLevel:
    """How one level of a sparse tree grows from the expanded nodes of the level above."""

    ancestors: Bool[Tensor, "above expanded"] | None
    """For each expanded node above, which of all nodes expanded so far it descends from; None for the root."""
    parents: Int[Tensor, " nodes"]
    """For each node, the index of its parent among the expanded nodes above."""
    ranks: Int[Tensor, " nodes"]
    expanding: Int[Tensor, " below"]
    """Which of the nodes have children."""
    num_ranks: int


@lru_cache(maxsize=16)
def _sparse_plan(
    paths: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Structure, tuple[_SparseLevel, ...]]:
    """Structure of a sparse tree, nodes sorted by level and path, and the plan of its levels."""
    nodes = [(), *sorted(paths, key=lambda path: (len(path), path))]
    place = {path: index for index, path in enumerate(nodes)}
    structure = structure_of([-1, *(place[path[:-1]] for path in nodes[1:])], [len(path) for path in nodes], device)
    with_children = {path[:-1] for path in paths}
    expanded = [path for path in nodes if path in with_children]
    levels = []
    for depth in range(1, max(map(len, paths)) + 1):
        above = [path for path in expanded if len(path) == depth - 1]
        seen = expanded[: expanded.index(above[-1]) + 1]
        here = [path for path in nodes if len(path) == depth]
        sees = torch.tensor([[path[: len(other)] == other for other in seen] for path in above], device=device)
        levels.append(
            _SparseLevel(
                ancestors=None if depth == 1 else sees,
                parents=torch.tensor([above.index(path[:-1]) for path in here], device=device),
                ranks=torch.tensor([path[-1] for path in here], device=device),
                expanding=torch.tensor(
                    [i for i, path in enumerate(here) if path in with_children], dtype=torch.long, device=device
                ),
                num_ranks=1 + max(path[-1] for path in here),
            )
        )
    return structure, tuple(levels)


class _Best(NamedTuple):
    """The nodes of a level to expand, likeliest first."""

    tokens: Int[Tensor, "sequences new"]
    scores: Float[Tensor, "sequences new"]
    candidates: Int[Tensor, "sequences new"]
    """Their candidate numbers."""
    ancestors: Bool[Tensor, "sequences new expanded"]


class _DynamicGrowth(Growth):
    """EAGLE-2 (arXiv 2406.16858, section 4): expand by cumulative log-probability, then rerank all candidates.

    level 0   root                                   expanded[0]
    level 1   breadth candidates, all expanded       expanded[1 : 1 + breadth]
    level k   breadth * breadth candidates, the best `breadth` of them expanded

    Candidates are numbered in this order.
    """

    def __init__(self, roots: Int[Tensor, " sequences"], shape: DynamicShape) -> None:
        super().__init__(roots)
        self._shape = shape
        root = roots[:, None]
        zero = torch.zeros(root.shape, device=roots.device)
        itself = torch.ones(*root.shape, 1, dtype=torch.bool, device=roots.device)
        self._parents, self._scores = [torch.full_like(root, -1)], [zero]
        self._best = _Best(root, zero, torch.zeros_like(root), itself)
        self._num_candidates = 1

    @property
    def num_children(self) -> int:
        return self._shape.breadth

    def frontier(self) -> Frontier:
        return Frontier(self._best.tokens, self._best.ancestors if self.num_levels else None)

    def add(self, picked: SelectedTokens) -> None:
        breadth, above = self._shape.breadth, self._best
        tokens = picked.tokens.flatten(1)
        scores = at_most(above.scores[..., None], picked.log_probs).flatten(1)
        self._levels.append(tokens)
        self._parents.append(above.candidates.repeat_interleave(breadth, dim=1))
        self._scores.append(scores)
        if self.num_levels < self._shape.depth:
            best_scores, best = scores.topk(min(breadth, scores.shape[1]), dim=1)
            over = torch.div(best, breadth, rounding_mode="floor")[..., None]
            inherited = above.ancestors.gather(1, over.expand(-1, -1, above.ancestors.shape[2]))
            itself = torch.eye(best.shape[1], dtype=torch.bool, device=best.device).expand(best.shape[0], -1, -1)
            ancestors = torch.cat([inherited, itself], dim=2)
            self._best = _Best(tokens.gather(1, best), best_scores, best + self._num_candidates, ancestors)
        self._num_candidates += tokens.shape[1]

    def _keep(self, places: list[int]) -> None:
        super()._keep(places)
        self._parents = [level[places] for level in self._parents]
        self._scores = [level[places] for level in self._scores]
        self._best = _Best(*(tensor[places] for tensor in self._best))

    def trees(self) -> list[TokenTree]:
        tokens, parents = torch.cat(self._levels, dim=1), torch.cat(self._parents, dim=1)
        ranked = torch.cat(self._scores, dim=1).sort(dim=1, descending=True, stable=True)
        best = slice(0, self._shape.nodes + 1)
        return keep_best(tokens, parents, ranked.indices[:, best], ranked.values[:, best], self.num_levels)


def _tree(
    tokens: Int[Tensor, " nodes"],
    structure: Structure,
    num_levels: int,
    draft_probs: Float[Tensor, "nodes vocab"] | None = None,
    is_chain: bool = False,
) -> TokenTree:
    parents, depths, ancestors = structure.parents, structure.depths, structure.ancestors
    return TokenTree(tokens, parents, depths, ancestors, num_levels, draft_probs, is_chain)


@lru_cache(maxsize=64)
def structure_below(branching: tuple[int, ...], device: torch.device) -> Structure:
    """`fixed_structure`, cached."""
    return fixed_structure(branching, device)
