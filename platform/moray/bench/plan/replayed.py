"""Drafts that a plan compares, and their cycles as a replay recorded them. Knows acceptance, not costs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moray.bench.replay.chains import ChainMatches
from moray.bench.replay.configs import ReplayConfig
from moray.config import validate
from moray.drafters.configs import UsableConfig
from moray.errors import ConfigError, DataError
from moray.explain import one_line
from moray.trees.shapes import AnyShape, ChainShape


class ReplayedCycle(NamedTuple):
    """One cycle of one sequence."""

    nodes: int
    """Draft tokens that the pass verifies."""
    emitted: int
    """Tokens that the cycle adds to the answer, the target's own included."""


@dataclass(frozen=True)
class PlannedDraft:
    """What one row of a plan drafts in each cycle."""

    drafter: str
    shape: AnyShape | None
    """None for plain decoding, which drafts nothing."""

    @property
    def tree(self) -> str:
        """Name of the shape; "" for plain decoding."""
        return "" if self.shape is None else self.shape.name

    @property
    def depth(self) -> int:
        """Levels; 0 for plain decoding."""
        return 0 if self.shape is None else self.shape.depth

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain of one token per level."""
        return isinstance(self.shape, ChainShape)

    @property
    def name(self) -> str:
        """Drafter and tree, for tables and messages."""
        return self.drafter if self.shape is None else f"{self.drafter}, {self.tree}"


PLAIN = PlannedDraft("plain", None)


def chain(drafter: str, depth: int) -> PlannedDraft:
    """A chain of this depth."""
    return PlannedDraft(drafter, ChainShape(type="chain", depth=depth))


@dataclass(frozen=True)
class ReplayedTree:
    """A tree that is no chain, with its cycles in each continuation."""

    shape: AnyShape
    cycles: list[list[ReplayedCycle]]


@dataclass(frozen=True)
class ReplayedDrafts:
    """What a replay says of each drafter, and where drafters and log are."""

    log: str
    entries: dict[str, str | UsableConfig]
    """By drafter: its folder, or its configuration."""
    max_depths: dict[str, int]
    """By drafter: the deepest chain that was replayed."""
    continuations: dict[str, list[ChainMatches]]
    """By drafter: where its chains agree with each continuation."""
    trees: dict[str, list[ReplayedTree]]
    """By drafter: its other trees."""

    def cycles(self, draft: PlannedDraft) -> list[list[ReplayedCycle]]:
        """The cycles of each continuation. Those of plain decoding emit a token each."""
        if draft.shape is None:
            texts = next(iter(self.continuations.values()))
            return [[ReplayedCycle(0, 1)] * len(each.matched) for each in texts]
        if draft.is_chain:
            return [cycles_of_chain(each, draft.depth) for each in self.continuations[draft.drafter]]
        return next(each.cycles for each in self.trees[draft.drafter] if each.shape == draft.shape)


def cycles_of_chain(matches: ChainMatches, depth: int) -> list[ReplayedCycle]:
    """The cycles of chains of this depth in one continuation."""
    return [ReplayedCycle(nodes, emitted) for nodes, _, emitted in matches.cycles(depth)]


def read_replay(
    path: str, drafters: Sequence[str], trees: Sequence[str] | None, num_continuations: int | None
) -> ReplayedDrafts:
    """Read the JSON file of `pipelines.replay`.

    Args:
        path: the file.
        drafters: names of those to read; empty for all.
        trees: names of the trees to read, besides chains; None for all.
        num_continuations: number of continuations to read; None for all.

    Raises:
        ConfigError: there is no such file, it has no chains of all depths, or a drafter or tree is not in it.
        DataError: it is damaged.
    """
    found, settings = _parse(path)
    _check_names(path, found, settings, drafters, trees)
    chosen = drafters or tuple(found.continuations)
    wanted = {shape.name for shape in settings.trees} if trees is None else set(trees)
    cut = slice(num_continuations)
    for name in chosen:
        if not any(each.matched for each in found.continuations[name][cut]):
            raise ConfigError(f"replay '{path}' has no continuation of two tokens or more: record longer answers")
    return ReplayedDrafts(
        found.log,
        {name: found.entries[name] for name in chosen},
        {name: found.max_depths[name] for name in chosen},
        {name: found.continuations[name][cut] for name in chosen},
        {
            name: [
                ReplayedTree(each.shape, each.cycles[cut]) for each in found.trees[name] if each.shape.name in wanted
            ]
            for name in chosen
        },
    )


def _parse(path: str) -> tuple[ReplayedDrafts, ReplayConfig]:
    """Everything in the file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        chains, settings = found.get("chains", []), validate(ReplayConfig, found["settings"])
        names = [row["drafter"] for row in chains]
        shapes = {shape.name: shape for shape in settings.trees if not isinstance(shape, ChainShape)}
        drafts = ReplayedDrafts(
            settings.log,
            dict(zip(names, settings.drafters, strict=True)) if chains else {},
            {row["drafter"]: int(row["depth"]) for row in chains},
            {row["drafter"]: [ChainMatches(**each) for each in row["continuations"]] for row in chains},
            {name: _trees_of(name, found.get("rows", []), shapes) for name in names},
        )
    except OSError as error:
        raise ConfigError(
            f"replay '{path}' cannot be read ({error.strerror}); `pipelines.replay --json` makes one"
        ) from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(
            f"replay '{path}' is not what `pipelines.replay --json` writes ({one_line(str(error))}): replay again"
        ) from None
    return drafts, settings


def _trees_of(drafter: str, rows: Sequence[dict[str, Any]], shapes: Mapping[str, AnyShape]) -> list[ReplayedTree]:
    """The trees of one drafter; replays of earlier versions do not say how many nodes their cycles had."""
    return [
        ReplayedTree(
            shapes[row["tree"]],
            [
                [ReplayedCycle(*each) for each in zip(text["nodes"], text["emitted"], strict=True)]
                for text in row["cycles"]
            ],
        )
        for row in rows
        if row["drafter"] == drafter and row["tree"] in shapes and all("nodes" in text for text in row["cycles"])
    ]


def _check_names(
    path: str, found: ReplayedDrafts, settings: ReplayConfig, drafters: Sequence[str], trees: Sequence[str] | None
) -> None:
    """Refuse a file without chains, and drafters and trees that are not in it."""
    shapes = [shape.name for shape in settings.trees if not isinstance(shape, ChainShape)]
    if len(set(shapes)) < len(shapes):
        raise ConfigError(f"replay '{path}' has two trees of the same name: replay them one at a time")
    if not found.continuations:
        raise ConfigError(f"replay '{path}' has no chains of all depths: replay with max_depth=8")
    replayed = {each.shape.name for own in found.trees.values() for each in own}
    for name in trees or ():
        if name not in replayed:
            known = ", ".join(replayed) or "none"
            raise ConfigError(f"trees has '{name}', replay '{path}' only {known}: name one of those, or replay it too")
    for name in drafters:
        if name not in found.continuations:
            known = ", ".join(found.continuations)
            raise ConfigError(
                f"drafters has '{name}', replay '{path}' only {known}: name one of those, or replay it too"
            )
