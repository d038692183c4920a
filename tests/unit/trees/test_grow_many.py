"""Trees that grow side by side are those that grow alone, whichever of them ends early."""

import pytest
import torch
from one_tree import grow
from torch import Tensor

from moray.trees.grow import grow_many
from moray.trees.growth import SelectedTokens
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape, SparseShape

VOCABULARY = 11
SHAPES = [
    ChainShape(type="chain", depth=4),
    FixedShape(type="fixed", branching=(3, 2, 1, 2)),
    DynamicShape(type="dynamic", depth=4, breadth=3, nodes=17),
    SparseShape(type="sparse", paths=((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1), (0, 2, 1, 0))),
]
NEVER = 99


class Scribe:
    """A drafter of one sequence whose scores depend on a node's path, and which has nothing to say from a level on."""

    def __init__(self, seed: int, end: int = NEVER) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
        self.end = end
        self.seen: list[int] = []

    def step(self, tokens: Tensor, ancestors: Tensor | None, depth: int) -> Tensor | None:
        if depth >= self.end:
            return None
        self.seen += tokens.tolist()
        if ancestors is None:
            ancestors = torch.ones(len(tokens), len(self.seen), dtype=torch.bool)
        assert ancestors.shape == (len(tokens), len(self.seen))
        paths = [[self.seen[node] for node in row.nonzero()[:, 0].tolist()] for row in ancestors]
        assert all(len(path) == depth + 1 for path in paths)
        return torch.stack([sum(self.table[t] / (i + 1) for i, t in enumerate(reversed(path))) for path in paths])

    def select(self, logits: Tensor, depth: int, children: int):
        scores, tokens = logits.log_softmax(dim=-1).topk(children, dim=-1)
        return tokens, scores, logits.softmax(dim=-1)


def together(scribes: list[Scribe], asked_of: list[list[int]]):
    def step(asked, tokens, ancestors, depth):
        asked_of.append(list(asked))
        seen = [None] * len(asked) if ancestors is None else ancestors.expand(len(asked), -1, -1)
        found = [scribes[n].step(own, sees, depth) for n, own, sees in zip(asked, tokens, seen, strict=True)]
        left = [place for place, logits in enumerate(found) if logits is not None]
        return left, torch.stack([found[p] for p in left]) if left else torch.empty(0, 1, VOCABULARY)

    def select(asked, logits, depth, children):
        picked = [scribes[n].select(own, depth, children) for n, own in zip(asked, logits, strict=True)]
        tokens, scores, probs = zip(*picked, strict=True)
        return SelectedTokens(torch.stack(tokens), torch.stack(scores), probs)

    return step, select


def assert_same(tree, other) -> None:
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(other, name)), name
    assert (tree.max_depth, tree.is_chain, tree.num_empty_levels) == (
        other.max_depth,
        other.is_chain,
        other.num_empty_levels,
    )
    assert (tree.draft_probs is None) == (other.draft_probs is None)
    if tree.draft_probs is not None:
        torch.testing.assert_close(tree.draft_probs, other.draft_probs)


ENDS = [
    [NEVER],
    [NEVER, NEVER, NEVER],
    [2, NEVER, 0, 1, NEVER],
    [1, 1, 1],
    [0, 0],
    [3, 2, 1, 0],
]


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_sequence_has_the_tree_that_it_has_alone(shape, ends):
    roots = torch.arange(len(ends)) + 1
    alone = []
    for number, end in enumerate(ends):
        scribe = Scribe(number, end)
        alone.append(grow(roots[number : number + 1], shape, scribe.step, scribe.select))
    asked_of: list[list[int]] = []
    scribes = [Scribe(number, end) for number, end in enumerate(ends)]
    trees = grow_many(roots, shape, *together(scribes, asked_of))
    for tree, other in zip(trees, alone, strict=True):
        assert_same(tree, other)
    # Nobody is asked again who has given up.
    wanted = [[n for n, end in enumerate(ends) if end >= depth] for depth in range(shape.depth)]
    assert asked_of == [asked for asked in wanted if asked]
