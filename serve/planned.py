"""Serves what `pipelines.plan` found to be the fastest: its best.yaml in place of `drafters` and `engine.tree`."""

from typing import Any

from pydantic import Field

from moray.config import Config, load_config
from moray.drafters.configs import UsableConfig, name_of
from moray.errors import ConfigError
from moray.trees.shapes import Shape


class BestRow(Config):
    """What best.yaml holds; nothing where plain decoding is the fastest."""

    trees: tuple[Shape, ...] = Field(default=(), max_length=1)
    """The tree to draft."""
    drafters: tuple[str | UsableConfig, ...] = Field(default=(), max_length=1)
    """The drafter; none where the plan was made from rates, without a drafter."""


def with_plan(values: dict[str, Any]) -> dict[str, Any]:
    """Add the drafter and tree that `plan` names to the values of a `ServeConfig`. Its drafter becomes the default.

    Raises:
        ConfigError: the file is not a plan's, contradicts the other values, or leaves no drafter to draft its tree.
    """
    path = values.get("plan")
    if path is None:
        return values
    best = load_config(BestRow, [str(path)])
    drafters: dict[str, Any] = values.get("drafters") or {}
    engine: dict[str, Any] = values.get("engine") or {}
    if not best.trees:
        if drafters:
            raise ConfigError(
                f"plan '{path}' found plain decoding to be the fastest, but drafters names {', '.join(drafters)}: "
                "leave out one of the two"
            )
        return values
    tree = best.trees[0].model_dump(mode="json")
    if engine.get("tree", tree) != tree:
        raise ConfigError(f"plan '{path}' and engine.tree name different trees: leave out one of the two")
    planned = {
        name_of(entry): entry if isinstance(entry, str) else entry.model_dump(mode="json") for entry in best.drafters
    }
    for name, entry in planned.items():
        if drafters.get(name, entry) != entry:
            raise ConfigError(
                f"drafters.{name} is {drafters[name]}, but plan '{path}' gives that name to {entry}: rename the first"
            )
    if not planned and not drafters:
        raise ConfigError(f"plan '{path}' was made without a drafter: name in drafters the one that drafts its tree")
    return values | {"drafters": planned | drafters, "engine": engine | {"tree": tree}}
