"""Growing a token tree level by level with any drafter that can score the children of some nodes.

Knows neither models nor sampling: a `Step` scores, a `Select` picks children from the scores.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moray.trees.shapes import ChainShape, DynamicShape, GrowableShape, SparseShape
from moray.trees.tree import Structure, TokenTree, fixed_structure, structure_of

Step = Callable[[Int[Tensor, " new"], Bool[Tensor, "new expanded"] | None, int], Float[Tensor, "new vocab"] | None]
"""step(tokens, ancestors, depth) -> logits of each node's child; None ends the tree here.

`ancestors` says which of all nodes expanded so far (these included, in order) each new node descends from,
itself among them; None where every new node sees all of them (a chain). At depth 0 there is the root alone.
"""

Select = Callable[
    [Float[Tensor, "new vocab"], int, int],
    tuple[Int[Tensor, "new children"], Float[Tensor, "new children"], Float[Tensor, "new vocab"] | None],
]
"""select(logits, depth, k) -> k child tokens per node, best first; their log-probabilities; and the
distribution they were sampled from, or None for deterministic proposals."""


Budget = Callable[[list[float]], int]
"""budget(log_probs) -> how many nodes to keep, given the cumulative log-probabilities of the best ones, best first."""


def grow(
    root: Int[Tensor, " 1"], shape: GrowableShape, step: Step, select: Select, budget: Budget | None = None
) -> TokenTree:
    """Draft a tree of `shape` below `root`.

    A `budget` decides how many nodes of a dynamic tree are worth verifying, `shape.nodes` at most; that waits
    for the device once. Without it nothing does.
    """
    if isinstance(shape, DynamicShape):
        return _grow_dynamic(root, shape, step, select, budget)
    if isinstance(shape, SparseShape):
        return _grow_sparse(root, shape, step, select)
    branching = (1,) * shape.depth if isinstance(shape, ChainShape) else shape.branching
    return _grow_fixed(root, branching, step, select)


def _grow_fixed(root: Int[Tensor, " 1"], branching: tuple[int, ...], step: Step, select: Select) -> TokenTree:
    structure = _structure(branching, root.device)
    levels, probs = [root], []
    start, end = 0, 1
    for depth, width in enumerate(branching):
        is_chain = end == depth + 1
        logits = step(levels[-1], None if is_chain else structure.ancestors[start:end, :end], depth)
        if logits is None:
            branching = branching[:depth]
            structure = structure.first(end)
            break
        children, _, draft_probs = select(logits, depth, width)
        levels.append(children.reshape(-1))
        if draft_probs is not None:
            probs.append(draft_probs.repeat_interleave(width, dim=0))
        start, end = end, end + levels[-1].shape[0]
    # The root was not drafted: its row of draft_probs is never read.
    draft = torch.cat([probs[0][:1], *probs]) if probs else None
    return TokenTree(
        torch.cat(levels),
        structure.parents,
        structure.depths,
        structure.ancestors,
        len(branching),
        draft,
        is_chain=end == len(branching) + 1,
    )


def _grow_sparse(root: Int[Tensor, " 1"], shape: SparseShape, step: Step, select: Select) -> TokenTree:
    """Level by level; of each node's children only the named ranks are kept, and only nodes with children expanded."""
    structure, plan = _sparse_plan(shape.paths, root.device)
    tokens, expanding = [root], root
    for depth, level in enumerate(plan):
        logits = step(expanding, level.ancestors, depth)
        if logits is None:
            size = sum(part.shape[0] for part in tokens)
            structure, plan = structure.first(size), plan[:depth]
            break
        children, _, _ = select(logits, depth, level.num_ranks)
        tokens.append(children[level.parents, level.ranks])
        expanding = tokens[-1][level.expanding]
    return TokenTree(torch.cat(tokens), structure.parents, structure.depths, structure.ancestors, len(plan))


@dataclass(frozen=True)
class _SparseLevel:
    """How one level of a sparse tree grows out of the expanded nodes of the level above."""

    ancestors: Bool[Tensor, "above expanded"] | None
    """What the expanded nodes above see of all expanded so far; None for the root."""
    parents: Int[Tensor, " nodes"]
    """Of each node, its parent's place among the expanded nodes above."""
    ranks: Int[Tensor, " nodes"]
    expanding: Int[Tensor, " below"]
    """Which of the nodes have children."""
    num_ranks: int


@lru_cache(maxsize=16)
def _sparse_plan(
    paths: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Structure, tuple[_SparseLevel, ...]]:
    """A sparse tree's structure, nodes sorted by level and path, and its levels."""
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


def root_alone(root: Int[Tensor, " 1"]) -> TokenTree:
    """The tree without a draft: verifying it is a plain step."""
    structure = _structure((), root.device)
    return TokenTree(root, structure.parents, structure.depths, structure.ancestors, 0)


def _grow_dynamic(
    root: Int[Tensor, " 1"], shape: DynamicShape, step: Step, select: Select, budget: Budget | None
) -> TokenTree:
    """EAGLE-2 (arXiv 2406.16858, section 4): expand by cumulative log-probability, then rerank all candidates.

    level 0   root                                   expanded[0]
    level 1   breadth candidates, all expanded       expanded[1 : 1 + breadth]
    level k   breadth * breadth candidates, the best `breadth` of them expanded

    Candidates are numbered in this order.
    """
    device, breadth = root.device, shape.breadth
    tokens, parents, scores = [root], [torch.full_like(root, -1)], [torch.zeros(1, device=device)]
    frontier_tokens = root
    frontier_scores = torch.zeros(1, device=device)
    frontier_nodes = torch.zeros_like(root)  # index of each frontier node among all candidates
    ancestors = torch.ones(1, 1, dtype=torch.bool, device=device)  # frontier x expanded
    num_candidates = 1
    num_levels = 0
    for depth in range(shape.depth):
        logits = step(frontier_tokens, None if depth == 0 else ancestors, depth)
        if logits is None:
            break
        children, log_probs, _ = select(logits, depth, breadth)
        cumulative = (frontier_scores[:, None] + log_probs).reshape(-1)
        tokens.append(children.reshape(-1))
        parents.append(frontier_nodes.repeat_interleave(breadth))
        scores.append(cumulative)
        if depth + 1 < shape.depth:
            frontier_scores, best = cumulative.topk(min(breadth, cumulative.shape[0]))
            frontier_tokens = tokens[-1][best]
            frontier_nodes = best + num_candidates
            inherited = ancestors[torch.div(best, breadth, rounding_mode="floor")]
            itself = torch.eye(best.shape[0], dtype=torch.bool, device=device)
            ancestors = torch.cat([inherited, itself], dim=1)
        num_candidates += cumulative.shape[0]
        num_levels += 1
    ranked = torch.cat(scores).sort(descending=True, stable=True)
    best, deepest = ranked.indices[: shape.nodes + 1], num_levels
    if budget is not None and num_levels:
        # In one copy; indices of candidates are far below what doubles count exactly.
        log_probs, indices = torch.stack([ranked.values.double(), ranked.indices.double()])[:, : best.shape[0]].tolist()
        best = best[: budget(log_probs[1:]) + 1]
        deepest = max(_level(int(index), breadth) for index in indices[: best.shape[0]])
    tree = _keep_best(torch.cat(tokens), torch.cat(parents), best, deepest)
    return replace(tree, num_empty_levels=num_levels - deepest)


def _level(candidate: int, breadth: int) -> int:
    """Where a candidate of a dynamic tree stands: see the numbering in `_grow_dynamic`."""
    if candidate == 0:
        return 0
    return 1 if candidate <= breadth else 2 + (candidate - 1 - breadth) // breadth**2


def _keep_best(
    tokens: Int[Tensor, " candidates"],
    parents: Int[Tensor, " candidates"],
    best: Int[Tensor, " kept"],
    max_depth: int,
) -> TokenTree:
    """The tree of the root and the likeliest candidates, none of them deeper than `max_depth`.

    A child scores at most its parent's score and stands behind it, so a stable sort keeps every kept node's
    parent too.
    """
    kept = best.sort().values
    rank = torch.zeros_like(parents).scatter_(0, kept, torch.arange(kept.shape[0], device=kept.device))
    new_parents = torch.where(kept == 0, -1, rank[parents[kept].clamp(min=0)])
    size = kept.shape[0]
    ancestors = torch.eye(size, dtype=torch.bool, device=kept.device)
    hop = new_parents.clamp(min=0)
    rows = torch.arange(size, device=kept.device)
    depths = torch.zeros_like(new_parents)
    node = rows
    for _ in range(max_depth):
        depths += (node != 0).long()
        node = hop[node]
        ancestors[rows, node] = True
    return TokenTree(tokens[kept], new_parents, depths, ancestors, max_depth)


@lru_cache(maxsize=64)
def _structure(branching: tuple[int, ...], device: torch.device) -> Structure:
    return fixed_structure(branching, device)
