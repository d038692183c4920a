"""Puts the drafter and the tree of a plan's best.yaml into the values of a `ServeConfig`."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from moray.config import Config, load_config, validate
from moray.drafters.configs import UsableConfig, drafter_name
from moray.errors import ConfigError
from moray.trees.shapes import Shape

_LOGGER = logging.getLogger(__name__)


class BestRow(Config):
    """What best.yaml holds; nothing where plain decoding is the fastest."""

    trees: tuple[Shape, ...] = Field(default=(), max_length=1)
    """The tree to draft."""
    drafters: tuple[str | UsableConfig, ...] = Field(default=(), max_length=1)
    """The drafter; none where the plan was made from rates, without a drafter."""

    @model_validator(mode="after")
    def _check(self) -> "BestRow":
        if self.drafters and not self.trees:
            raise ValueError("drafters is given without trees; give the file that `pipelines.plan` wrote")
        return self


def with_plan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the key `plan` by the drafter and the tree that the file names. The drafter becomes the first one.

    Raises:
        ConfigError: the file is not a plan's, contradicts the other values, or leaves no drafter to draft its tree.
    """
    path = values.get("plan")
    if path is None:
        return values
    values = {name: value for name, value in values.items() if name != "plan"}
    best = load_config(BestRow, [str(path)])
    drafters, engine = _mapping(values, "drafters"), _mapping(values, "engine")
    if not best.trees:
        if drafters:
            raise ConfigError(
                f"plan '{path}' found plain decoding to be the fastest, but drafters names {', '.join(drafters)}: "
                "leave out one of the two"
            )
        _LOGGER.warning("plan '%s' found plain decoding to be the fastest: this server drafts nothing", path)
        return values
    tree = best.trees[0].model_dump(mode="json")
    if engine.get("tree", tree) != tree:
        raise ConfigError(f"plan '{path}' and engine.tree name different trees: leave out one of the two")
    planned: dict[str, Any] = {}
    for entry in best.drafters:
        name = drafter_name(entry)
        if name in drafters and not _is_same(entry, drafters[name]):
            raise ConfigError(
                f"drafters.{name} is {drafters[name]}, but plan '{path}' gives that name to {entry}: rename the first"
            )
        planned[name] = entry if isinstance(entry, str) else entry.model_dump(mode="json")
    if not planned and not drafters:
        raise ConfigError(f"plan '{path}' was made without a drafter: name in drafters the one that drafts its tree")
    return values | {"drafters": planned | drafters | planned, "engine": {**engine, "tree": tree}}


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is {found}; with plan it has to be a mapping, or be left out")
    return found


def _is_same(planned: str | UsableConfig, given: object) -> bool:
    """Whether both are the same drafter, however they are written."""
    (entry,) = validate(BestRow, {"trees": [{"type": "chain", "depth": 1}], "drafters": [given]}).drafters
    if isinstance(planned, str) and isinstance(entry, str):
        return Path(planned) == Path(entry)
    return planned == entry
