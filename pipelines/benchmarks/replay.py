"""Synthetic acceptance: the number of draft tokens each cycle accepts is fixed before anything is drafted.

A target with random weights accepts nothing, so a cost benchmark sets the accepted lengths itself: at a given rate, or
replayed from the cycles of an evaluation. This module does not depend on what is benchmarked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from moray.bench.answers import ANSWERS_FILE, read_answers
from moray.decoding.generation import Generation, tau
from moray.decoding.sampling.accept import Accepted
from moray.decoding.sampling.sampler import Sampler
from moray.errors import ConfigError, DataError
from moray.trees.shapes import AnyShape
from moray.trees.tree import TokenTree
from pipelines.benchmarks.shaped_config import RecordedAcceptanceConfig

_GOLDEN_RATIO = 0.6180339887498949


class Lengths(Protocol):
    """Supplies the number of draft tokens that each cycle accepts."""

    def next(self, depth: int) -> int:
        """The accepted length of the next cycle, 0 to `depth`, where `depth` is the number of levels of its tree."""
        ...

    def restart(self) -> None:
        """Start over with the first cycle."""
        ...


class LengthsAtRate:
    """Accepts each draft token at the same rate, provided its parent was accepted.

    Lengths cover their distribution evenly instead of being drawn at random, so that a few cycles already give the
    requested tau.
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
    """Replays the accepted lengths of an evaluation in order, starting over at the end, capped by each tree's depth.

    A length is the number of tokens emitted minus the target's own token. It is less than was accepted where an answer
    ended inside a path. One full pass over the lengths therefore has the tau of the evaluation's report.
    """

    def __init__(self, lengths: Sequence[int], source: str) -> None:
        self._lengths = tuple(lengths)
        self.source = source
        """Where the lengths come from, in words."""
        self._cycle = 0

    @classmethod
    def read(cls, config: RecordedAcceptanceConfig) -> "RecordedLengths":
        """Read the lengths of one drafter and tree from the answers of an evaluation.

        Raises:
            ConfigError: the file cannot be read.
            DataError: the file is damaged, or holds no cycle of that drafter, tree and temperature.
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
    """Pick the requested drafter, tree and temperature from those that the file holds."""
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
    """A `sampling.accept.Accept` that accepts the deepest path up to the given length, whatever its tokens are."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths

    def restart(self) -> None:
        """Start over with the first cycle."""
        self._lengths.restart()

    def __call__(
        self, tree: TokenTree, logits: Float[Tensor, "nodes vocab"], sampler: Sampler, root_position: int
    ) -> Accepted:
        # Does the same work and the same device synchronisation as the greedy method.
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
    """Solve 1 + r + r^2 + ... + r^depth = tau for the rate r.

    Raises:
        ConfigError: the shape is too shallow for this tau.
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
