"""Combinations of a tree and a draft vocabulary, built from the values that a sweep chooses.

    tree.type dynamic, tree.depth 5, tree.breadth 4, tree.nodes 16, draft_vocab_size 512
    tree.type chain,   tree.depth 5, tree.breadth 4, tree.nodes 16     -> chain of 5, which has no breadth

Most of a grid over tree keys is invalid or yields the same tree again; such points are left out and counted. This
module does not depend on how the search works or what is measured, and imports neither torch nor ray.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moray.decoding.planning.fitting import is_too_deep
from moray.explain import one_line
from moray.trees.shapes import AdaptiveShape, AnyShape, DynamicShape, Shape, SparseShape
from sweeps.tuning.spaces import Choices, Space, Verdict, draw, grid

KEYS = ("tree", "tree.type", "tree.depth", "tree.breadth", "tree.nodes", "draft_vocab_size")
"""The keys that may be searched."""

BUILT = {"chain": ("depth",), "dynamic": ("depth", "breadth", "nodes"), "adaptive": ("depth", "breadth", "nodes")}
"""Types of tree that `tree.type` builds, and the keys that each reads."""

_SHAPE: TypeAdapter[AnyShape] = TypeAdapter(Shape)
_MAX_DRAWS = 500


class UnfitError(Exception):
    """The choices form no valid combination; the message says why."""


@dataclass(frozen=True)
class Limits:
    """The limits of a trained drafter."""

    name: str
    max_depth: int | None
    num_tokens: int
    """Size of its draft vocabulary, as trained."""


@dataclass(frozen=True)
class Combination:
    """One way of decoding with one drafter."""

    drafter: str
    tree: AnyShape
    draft_vocab_size: int | None
    """None keeps the vocabulary as trained."""

    @classmethod
    def of(cls, choices: Choices) -> "Combination":
        """The inverse of `choices`."""
        return cls(choices["drafter"], parse_tree(choices["tree"]), choices["draft_vocab_size"])

    @property
    def choices(self) -> Choices:
        """The combination as plain values, as stored in a trial's folder."""
        return {"drafter": self.drafter, **self.decoding}

    @property
    def decoding(self) -> Choices:
        """The same without the drafter."""
        return {"tree": self.tree.model_dump(mode="json"), "draft_vocab_size": self.draft_vocab_size}

    @property
    def name(self) -> str:
        """A readable name that is unique to the combination."""
        tree = self.tree.name
        if isinstance(self.tree, SparseShape):  # its name holds only the number of nodes
            tree += f"-{hashlib.sha256(str(self.tree.paths).encode()).hexdigest()[:6]}"
        tokens = "" if self.draft_vocab_size is None else f", {self.draft_vocab_size} tokens"
        return f"{self.drafter}, {tree}{tokens}"


@dataclass
class Listing:
    """Distinct combinations, and counts of the choices that were left out."""

    combinations: list[Combination] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of choices left out, by reason."""

    def add(self, choices: Choices, limits: Limits) -> Verdict:
        """Combine choices and keep the result if it is new, else count them as left out."""
        try:
            found = combine(choices, limits)
        except UnfitError as error:
            self.left_out[str(error)] += 1
            return "unfit"
        if found in self.combinations:
            self.left_out[_same_again(choices)] += 1
            return "again"
        self.combinations.append(found)
        return "new"

    def why(self) -> str:
        """The reasons, most frequent first."""
        return "; ".join(f"{count} x {reason}" for reason, count in self.left_out.most_common())


def parse_tree(values: Mapping[str, Any]) -> AnyShape:
    """Parse a tree from its configuration as plain values."""
    return _SHAPE.validate_json(json.dumps(dict(values)))


def combine(choices: Choices, limits: Limits) -> Combination:
    """Build the combination that chosen values give for one drafter.

    Keys that the type of tree does not use are ignored; an adaptive tree is limited to the drafter's maximum depth.

    Raises:
        UnfitError: the values form no valid combination.
    """
    tree = _tree(choices)
    if is_too_deep(tree, limits.max_depth):
        raise UnfitError(f"depth {tree.depth}: this drafter drafts at most {limits.max_depth} levels")
    if isinstance(tree, AdaptiveShape):
        tree = tree.limited(limits.max_depth)
    if isinstance(tree, DynamicShape | AdaptiveShape) and tree.nodes is not None and tree.breadth > tree.nodes:
        raise UnfitError(f"breadth {tree.breadth} is more than {tree.nodes} nodes")
    size = choices.get("draft_vocab_size")
    if size is not None:
        if not isinstance(size, int) or size < 2:
            raise UnfitError(f"draft_vocab_size {size} is no number of at least 2")
        if size >= limits.num_tokens:
            raise UnfitError(f"draft_vocab_size {size} is not less than this drafter's {limits.num_tokens} tokens")
        if tree.max_children > size:
            raise UnfitError(f"{tree.max_children} children of a node are more than {size} tokens")
    return Combination(limits.name, tree, size)


def listed(space: Space, limits: Limits) -> Listing:
    """All distinct combinations of a grid."""
    return _listing(grid(space), limits)


def drawn(space: Space, limits: Limits, count: int, seed: int) -> Listing:
    """Draw up to `count` distinct combinations at random."""
    rng, found = random.Random(seed), Listing()
    while len(found.combinations) < count and draw_another(space, limits, found, rng) is not None:
        pass
    return found


def draw_another(space: Space, limits: Limits, known: Listing, rng: random.Random) -> Choices | None:
    """Draw until a combination is new and add it to `known`; returns its choices, or None after too many draws."""
    for _ in range(_MAX_DRAWS):
        choices = draw(space, rng)
        if known.add(choices, limits) == "new":
            return choices
    return None


def _same_again(choices: Choices) -> str:
    kind = choices.get("tree.type")
    read = {f"tree.{name}" for name in ("type", *BUILT.get(kind, ()))} if kind else choices
    unread = [key.removeprefix("tree.") for key in choices if key.startswith("tree.") and key not in read]
    return f"a {kind} has no {' or '.join(unread)}: the same as another one" if unread else "the same as another one"


def _listing(points: Iterable[Choices], limits: Limits) -> Listing:
    found = Listing()
    for choices in points:
        found.add(choices, limits)
    return found


def _tree(choices: Choices) -> AnyShape:
    if "tree" in choices:
        return parse_tree(choices["tree"])
    values = {name: choices.get(f"tree.{name}") for name in BUILT[choices["tree.type"]]}
    if choices["tree.type"] == "adaptive" and values["breadth"] in (None, 1):
        values |= {"breadth": None, "nodes": None}  # an adaptive tree of breadth 1 is a chain
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return parse_tree({"type": choices["tree.type"], **given})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = problem["loc"][-1] if problem["loc"][-1:] and problem["loc"][-1] != choices["tree.type"] else ""
        text = one_line(problem["msg"]).removeprefix("Value error, ")
        raise UnfitError(f"{choices['tree.type']} tree: {f'{where}: ' if where else ''}{text}") from None
