"""Synthetic acceptance: how many drafted tokens each cycle accepts, decided before anything is drafted.

Random weights accept nothing, so a benchmark of costs says itself how far each cycle gets: at a set rate, or as far
as the cycles of an evaluation got. This module refuses to know what is benchmarked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from moray.bench.answers import ANSWERS_FILE, read_answers
from moray.decoding.sampling.accept import Accepted
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.stats import Generation, tau
from moray.errors import ConfigError, DataError
from moray.trees.shapes import AnyShape
from moray.trees.tree import TokenTree
from pipelines.benchmarks.shaped_config import RecordedAcceptanceConfig

_GOLDEN_RATIO = 0.6180339887498949


class Lengths(Protocol):
    """How many draft tokens each cycle accepts."""

    def next(self, depth: int) -> int:
        """Of the cycle that comes next, whose tree has `depth` levels: 0 to `depth`."""
        ...

    def restart(self) -> None:
        """Begin again with the first cycle."""
        ...


class LengthsAtRate:
    """Every draft token is accepted at the same rate if the one above it was.

    Lengths are spread evenly over their distribution instead of drawn, so that few cycles give the tau asked for.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._cycle = 0

    def next(self, depth: int) -> int:
        self._cycle += 1
        uniform = self._cycle * _GOLDEN_RATIO % 1.0
        return next((k for k in range(depth) if uniform >= self._rate ** (k + 1)), depth)

    def restart(self) -> None:
        self._cycle = 0


class RecordedLengths:
    """What the cycles of an evaluation accepted: in their order, cyclically, no deeper than the tree of the cycle.

    Counted is what reached the answer, tokens emitted less the target's own: where an answer ended inside a path,
    less than was accepted. So a whole round has the tau of the evaluation's report.
    """

    def __init__(self, lengths: Sequence[int], source: str) -> None:
        self._lengths = tuple(lengths)
        self.source = source
        """Where they come from, in words."""
        self._cycle = 0

    @classmethod
    def read(cls, config: RecordedAcceptanceConfig) -> "RecordedLengths":
        """Read one drafter and tree from the answers of an evaluation.

        Raises:
            ConfigError: no such file.
            DataError: the file is damaged, or holds nothing of that drafter, tree and temperature.
        """
        path = Path(config.recorded)
        path = path / ANSWERS_FILE if path.is_dir() else path
        generations: dict[tuple[str, str, float], list[Generation]] = {}
        for line in read_answers(path):
            for answer in line.answers:
                if answer.tree:
                    key = answer.method, answer.tree, line.temperature
                    generations.setdefault(key, []).append(answer.generation)
        chosen = generations[_choose(config, path, list(generations))]
        lengths = [emitted - 1 for generation in chosen for emitted in generation.emitted]
        if not lengths:
            raise DataError(
                f"'{path}' has no cycle of {config.drafter}, {config.tree}: every answer ended with its first token; "
                "name another drafter or tree"
            )
        source = (
            f"replayed from {path}, {config.drafter}, {config.tree}, recorded tau {tau(chosen):.3g} over "
            f"{len(lengths)} cycles"
        )
        return cls(lengths, source)

    def next(self, depth: int) -> int:
        length = self._lengths[self._cycle % len(self._lengths)]
        self._cycle += 1
        return min(length, depth)

    def restart(self) -> None:
        self._cycle = 0


def _choose(
    config: RecordedAcceptanceConfig, path: Path, there: list[tuple[str, str, float]]
) -> tuple[str, str, float]:
    """The one drafter, tree and temperature that is meant, of those that are there."""
    drafters = list(dict.fromkeys(drafter for drafter, _, _ in there))
    if config.drafter not in drafters:
        raise DataError(
            f"acceptance.drafter is '{config.drafter}', which '{path}' does not hold; it holds "
            f"{', '.join(drafters) or 'no drafter'}"
        )
    trees = list(dict.fromkeys(tree for drafter, tree, _ in there if drafter == config.drafter))
    if config.tree not in trees:
        raise DataError(
            f"acceptance.tree is '{config.tree}', which '{path}' does not hold for {config.drafter}; it holds "
            f"{', '.join(trees)}"
        )
    keys = [key for key in there if key[:2] == (config.drafter, config.tree)]
    meant = [key for key in keys if config.temperature in (None, key[2])]
    if len(meant) != 1:
        wanted = "null" if config.temperature is None else f"{config.temperature:g}"
        raise DataError(
            f"acceptance.temperature is {wanted}; '{path}' holds {', '.join(f'{key[2]:g}' for key in keys)}: name one "
            "of them"
        )
    return meant[0]


class ReplayedAcceptance:
    """Accepts the longest path of a tree as far as `lengths` say, whatever it says: a `sampling.accept.Accept`."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths

    def restart(self) -> None:
        """Begin again with the first cycle."""
        self._lengths.restart()

    def __call__(
        self, tree: TokenTree, logits: Float[Tensor, "nodes vocab"], sampler: Sampler, root_position: int
    ) -> Accepted:
        # The same work and the same wait for the device as the greedy rule.
        rows = torch.stack([tree.tokens, tree.parents, tree.depths, logits.argmax(dim=-1)])
        tokens, parents, depths, chosen = rows.tolist()
        path: list[int] = []
        node = depths.index(max(depths))
        while node != 0:
            path.insert(0, node)
            node = parents[node]
        path = path[: self._lengths.next(len(path))]
        return Accepted(path, [tokens[child] for child in path], chosen[path[-1] if path else 0])


def acceptance_rate(wanted: float, shape: AnyShape) -> float:
    """The rate r with 1 + r + r^2 + ... + r^depth = tau.

    Raises:
        ConfigError: the shape is too shallow for it.
    """
    if wanted > shape.depth + 1:
        raise ConfigError(
            f"tau is {wanted:g}; a tree '{shape.name}' emits {shape.depth + 1} tokens a pass at most: take a deeper "
            "tree or a smaller tau"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**k for k in range(shape.depth + 1)) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
