"""Shapes of token trees: how deep, how wide, how many nodes. Torch-free configuration."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from moray.config import Config

MAX_DEPTH = 64
"""Maximum levels below the root of any tree: drafts may run this far past the end of the context."""


class ChainShape(Config):
    """One token per level."""

    type: Literal["chain"]
    depth: int = Field(ge=1, le=MAX_DEPTH)
    """Number of tokens in the chain."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"chain-{self.depth}"

    @property
    def num_nodes(self) -> int:
        """Maximum number of draft nodes (root not counted) that one target pass verifies."""
        return self.depth

    @property
    def max_children(self) -> int:
        """Maximum number of children of a node."""
        return 1

    @property
    def num_expanded(self) -> int:
        """Maximum number of nodes that the drafter expands, root included."""
        return self.depth


class FixedShape(Config):
    """Every node of level k has `branching[k]` children."""

    type: Literal["fixed"]
    branching: tuple[int, ...] = Field(min_length=1, max_length=16)
    """Children of each node, level by level: [3, 2] drafts 3 tokens, and 2 after each of them."""

    @model_validator(mode="after")
    def _check(self) -> "FixedShape":
        if min(self.branching) < 1 or self.num_nodes > 512:
            raise ValueError(f"branching {self.branching} must be positive and make at most 512 nodes")
        return self

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "fixed-" + "x".join(str(width) for width in self.branching)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.branching)

    @property
    def num_nodes(self) -> int:
        """Draft nodes (root not counted)."""
        level, total = 1, 0
        for width in self.branching:
            level *= width
            total += level
        return total

    @property
    def max_children(self) -> int:
        """Maximum number of children of a node."""
        return max(self.branching)

    @property
    def num_expanded(self) -> int:
        """Number of nodes that the drafter expands: all levels but the last."""
        return 1 + self.num_nodes - math.prod(self.branching)


class DynamicShape(Config):
    """EAGLE-2's tree: expand the `breadth` likeliest nodes per level, keep the `nodes` likeliest overall."""

    type: Literal["dynamic"]
    depth: int = Field(ge=1, le=32)
    """Levels below the root."""
    breadth: int = Field(ge=1, le=64)
    """Number of likeliest nodes of each level that are expanded."""
    nodes: int = Field(ge=1, le=512)
    """Number of likeliest nodes kept of the whole tree, root not counted."""

    @model_validator(mode="after")
    def _check(self) -> "DynamicShape":
        most = self.breadth + (self.depth - 1) * self.breadth**2
        if self.nodes > most:
            raise ValueError(f"nodes is {self.nodes}, but depth {self.depth} and breadth {self.breadth} make {most}")
        return self

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"dynamic-{self.depth}x{self.breadth}-{self.nodes}"

    @property
    def num_nodes(self) -> int:
        """Draft nodes that one target pass verifies (root not counted)."""
        return self.nodes

    @property
    def max_children(self) -> int:
        """Maximum number of children of a node."""
        return self.breadth

    @property
    def num_expanded(self) -> int:
        """Maximum number of nodes that the drafter expands, root included."""
        return 1 + (self.depth - 1) * self.breadth


class SparseShape(Config):
    """Medusa's static tree (arXiv 2401.10774, section 2.3.3): exactly the named nodes, each given by the ranks on its
    path.

    [0] is the likeliest token after the root, [0, 1] the second likeliest token after [0].
    """

    type: Literal["sparse"]
    paths: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] = Field(min_length=1, max_length=512)
    """Nodes of the tree, each given by the ranks on its path: [0] is the likeliest token after the root."""

    @model_validator(mode="after")
    def _check(self) -> "SparseShape":
        known = {(), *self.paths}
        if len(known) <= len(self.paths):
            raise ValueError("paths names a node twice, or the root; name every other node once")
        for path in self.paths:
            if path[:-1] not in known:
                raise ValueError(f"paths holds {list(path)} but not its parent {list(path[:-1])}; add it")
        return self

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"sparse-{len(self.paths)}"

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(map(len, self.paths))

    @property
    def num_nodes(self) -> int:
        """Draft nodes (root not counted)."""
        return len(self.paths)

    @property
    def max_children(self) -> int:
        """How many of a node's likeliest children the drafter has to score."""
        return 1 + max(path[-1] for path in self.paths)

    @property
    def num_expanded(self) -> int:
        """Number of nodes that the drafter expands: those with children."""
        return len({path[:-1] for path in self.paths})


class AdaptiveShape(Config):
    """Depth and number of nodes are chosen in every cycle from measured costs and recent acceptance
    (`decoding.planning`), down to no draft at all if drafting would be a loss.

    With greedy or coupled sampling the text never depends on the choice. With rejection its distribution does not, but
    the same seed may give another text on another machine.
    """

    type: Literal["adaptive"]
    depth: int = Field(default=8, ge=1, le=32)
    """Maximum number of levels below the root."""
    breadth: int = Field(default=1, ge=1, le=64)
    """Number of likeliest nodes of each level that are expanded; 1 drafts chains, more dynamic trees."""
    nodes: int | None = Field(default=None, ge=1, le=512)
    """Maximum nodes of a tree, root not counted; null for chains, required if breadth is above 1."""

    @model_validator(mode="after")
    def _check(self) -> "AdaptiveShape":
        if (self.nodes is None) != (self.breadth == 1):
            raise ValueError(
                f"nodes is {self.nodes}, breadth {self.breadth}; give nodes if breadth > 1, else leave it out"
            )
        if self.nodes is not None:
            DynamicShape(type="dynamic", depth=self.depth, breadth=self.breadth, nodes=self.nodes)
        return self

    def limited(self, depth: int | None) -> "AdaptiveShape":
        """The same shape with at most `depth` levels."""
        if depth is None or depth >= self.depth:
            return self
        nodes = None if self.nodes is None else self.at(depth).num_nodes
        return AdaptiveShape(type="adaptive", depth=depth, breadth=self.breadth, nodes=nodes)

    def at(self, depth: int) -> ChainShape | DynamicShape:
        """The shape of a cycle that drafts `depth` levels."""
        if self.nodes is None:
            return ChainShape(type="chain", depth=depth)
        most = self.breadth + (depth - 1) * self.breadth**2
        return DynamicShape(type="dynamic", depth=depth, breadth=self.breadth, nodes=min(self.nodes, most))

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"adaptive-{self.depth}" if self.nodes is None else f"adaptive-{self.depth}x{self.breadth}-{self.nodes}"

    @property
    def num_nodes(self) -> int:
        """Maximum number of draft nodes (root not counted) that one target pass verifies."""
        return self.at(self.depth).num_nodes

    @property
    def max_children(self) -> int:
        """Maximum number of children of a node."""
        return self.breadth

    @property
    def num_expanded(self) -> int:
        """Maximum number of nodes that the drafter expands, root included."""
        return self.at(self.depth).num_expanded


GrowableShape = ChainShape | FixedShape | DynamicShape | SparseShape
"""The shapes that one cycle can draft."""

AnyShape = GrowableShape | AdaptiveShape

Shape = Annotated[AnyShape, Field(discriminator="type")]


def num_expanded_ahead(depth: int) -> int:
    """Maximum number of nodes that a drafter expands for a chain, the next root, and another chain of this depth below
    it."""
    return 2 * depth + 1
