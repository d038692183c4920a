"""What is drafted in a plan's cycles, and what a replay says of it."""

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
    accepted: int
    emitted: int
    """Tokens of the answer."""


@dataclass(frozen=True)
class Draft:
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
        """For tables and messages."""
        return self.drafter if self.shape is None else f"{self.drafter}, {self.tree}"


PLAIN = Draft("plain", None)


def chain(drafter: str, depth: int) -> Draft:
    """A chain of this depth."""
    return Draft(drafter, ChainShape(type="chain", depth=depth))


@dataclass(frozen=True)
class ReplayedTree:
    """A tree that is no chain, with its cycles in each continuation."""

    draft: Draft
    cycles: list[list[ReplayedCycle]]


@dataclass(frozen=True)
class ReplayedDrafts:
    """What a replay says of each drafter, and where drafters and log are."""

    log: str
    entries: dict[str, str | UsableConfig]
    """By drafter: its folder, or its configuration."""
    depth: dict[str, int]
    """By drafter: depth up to which its chains were replayed."""
    continuations: dict[str, list[ChainMatches]]
    """By drafter."""
    trees: dict[str, list[ReplayedTree]]
    """By drafter."""

    def cycles(self, draft: Draft) -> list[list[ReplayedCycle]]:
        """The cycles of each continuation. Those of plain decoding emit a token each."""
        if draft.shape is None:
            texts = next(iter(self.continuations.values()))
            return [[ReplayedCycle(0, 0, 1)] * len(each.matched) for each in texts]
        if draft.is_chain:
            return [cycles_of_chain(each, draft.depth) for each in self.continuations[draft.drafter]]
        return next(each.cycles for each in self.trees[draft.drafter] if each.draft == draft)


def cycles_of_chain(matches: ChainMatches, depth: int) -> list[ReplayedCycle]:
    """The cycles of chains of this depth in one continuation."""
    return [ReplayedCycle(*each) for each in matches.cycles(depth)]


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
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        chains, settings = found.get("chains", []), validate(ReplayConfig, found["settings"])
        names = [row["drafter"] for row in chains]
        entries = dict(zip(names, settings.drafters, strict=True)) if chains else {}
        depth = {row["drafter"]: int(row["depth"]) for row in chains}
        continuations = {
            row["drafter"]: [ChainMatches(**each) for each in row["continuations"]][:num_continuations]
            for row in chains
        }
        rows = found.get("rows", [])
        shapes = {shape.name: shape for shape in settings.trees if not isinstance(shape, ChainShape)}
        replayed = {name: _trees(name, rows, shapes, trees, num_continuations) for name in names}
    except OSError as error:
        raise ConfigError(
            f"replay '{path}' cannot be read ({error.strerror}); `pipelines.replay --json` makes one"
        ) from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(
            f"replay '{path}' is not what `pipelines.replay --json` writes ({one_line(str(error))}): replay again"
        ) from None
    if len(shapes) < sum(not isinstance(shape, ChainShape) for shape in settings.trees):
        raise ConfigError(f"replay '{path}' has two trees of the same name: replay them one at a time")
    if not chains:
        raise ConfigError(f"replay '{path}' has no chains of all depths: replay with max_depth=8")
    for name in trees or ():
        if name not in shapes:
            known = ", ".join(shapes) or "none"
            raise ConfigError(f"trees has '{name}', replay '{path}' only {known}: name one of those, or replay it too")
    for name in drafters:
        if name not in continuations:
            raise ConfigError(
                f"drafters has '{name}', replay '{path}' only {', '.join(names)}: name one of those, or replay it too"
            )
    chosen = drafters or names
    for name in chosen:
        if not any(each.matched for each in continuations[name]):
            raise ConfigError(f"replay '{path}' has no continuation of two tokens or more: record longer answers")
    return ReplayedDrafts(
        settings.log,
        {name: entries[name] for name in chosen},
        {name: depth[name] for name in chosen},
        {name: continuations[name] for name in chosen},
        {name: replayed[name] for name in chosen},
    )


def _trees(
    drafter: str,
    rows: Sequence[dict[str, Any]],
    shapes: Mapping[str, AnyShape],
    trees: Sequence[str] | None,
    num_continuations: int | None,
) -> list[ReplayedTree]:
    """The trees of one drafter."""
    found = []
    for row in rows:
        name = row["tree"]
        if row["drafter"] != drafter or name not in shapes or (trees is not None and name not in trees):
            continue
        cycles = [
            [ReplayedCycle(*each) for each in zip(text["nodes"], text["accepted"], text["emitted"], strict=True)]
            for text in row["cycles"][:num_continuations]
        ]
        found.append(ReplayedTree(Draft(drafter, shapes[name]), cycles))
    return found
