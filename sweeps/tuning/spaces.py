"""The search space of a sweep: values of configuration keys, by dotted name.

    space:
      drafter.target_layers: [0, 1, 2]
      optim.lr: {type: loguniform, low: 1e-3, high: 1e-1}

This module does not depend on what the keys mean or on the searcher. Values are passed to searchers as JSON text,
because some of them (Optuna) do not accept lists. It imports neither torch nor ray.
"""

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from moray.config import Config

_MAX_LABEL = 80
_MAX_CORNERS = 512
MAX_DRAWS = 50
"""Draws per trial before giving up on finding a new combination."""

Choices = Mapping[str, Any]
"""One value for every key of a space; this defines a trial."""

Verdict = Literal["new", "again", "unfit"]
"""Judgement of a proposal: `new` is to be tried, `again` is already known, `unfit` is not valid."""


class Range(Config):
    """Numbers between two bounds, both included."""

    type: Literal["uniform", "loguniform", "integers"]
    """How numbers are drawn: uniform, uniform in the logarithm, or uniform over integers."""
    low: float
    """Lowest number, inclusive."""
    high: float
    """Highest number, inclusive."""

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        if self.type == "loguniform" and self.low <= 0:
            raise ValueError(f"low is {self.low:g}; a loguniform range begins above 0")
        if self.type == "integers" and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low {self.low:g} and high {self.high:g} of integers must be whole numbers")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Both ends, as integers for a range of integers."""
        return (int(self.low), int(self.high)) if self.type == "integers" else (self.low, self.high)


Dimension = list[Any] | Range
"""A list of values, or a range."""

_KINDS = ["uniform", "loguniform", "integers"]  # not a set: `type` may be an unhashable list, for a key named `type`


def _dimensions(values: Any) -> Any:
    """Restore dotted keys that a command line override has nested (`space.optim.lr=...`)."""
    return _dotted(values, "") if isinstance(values, Mapping) else values


def _dotted(values: Mapping[str, Any], prefix: str) -> dict[str, Dimension]:
    found: dict[str, Dimension] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (value.get("type") in _KINDS or "low" in value):
            found[key] = Range.model_validate(dict(value))
        elif isinstance(value, Mapping):
            found |= _dotted(value, f"{key}.")
        elif isinstance(value, list | tuple) and value:
            texts = [json.dumps(item) for item in value]
            twice = next((text for text in texts if texts.count(text) > 1), None)
            if twice is not None:
                raise ValueError(f"'{key}' lists {twice} twice: name each value once")
            found[key] = list(value)
        else:
            raise ValueError(
                f"'{key}' is {json.dumps(value)}; give a list of values, or a range such as "
                "{type: loguniform, low: 1e-4, high: 1e-2}"
            )
    return found


Space = Annotated[dict[str, Dimension], BeforeValidator(_dimensions)]
"""The values to choose from, by dotted key."""


def size(space: Space) -> int | None:
    """The number of combinations; None if there is a range."""
    if any(isinstance(dimension, Range) for dimension in space.values()):
        return None
    return math.prod(len(dimension) for dimension in space.values() if isinstance(dimension, list))


def grid(space: Space) -> Iterator[Choices]:
    """Yield every combination, with the last key changing fastest; a range contributes only its ends."""
    values = [dimension.bounds if isinstance(dimension, Range) else dimension for dimension in space.values()]
    for combination in itertools.product(*values):
        yield dict(zip(space, combination, strict=True))


def corners_of(space: Space) -> list[Choices]:
    """Every combination or, if there are too many, a subset in which each value of each key occurs."""
    count = size(space)
    if count is not None and count <= _MAX_CORNERS:
        return list(grid(space))
    values = {key: list(d.bounds) if isinstance(d, Range) else d for key, d in space.items()}
    base = {key: options[0] for key, options in values.items()}
    single: list[Choices] = [{**base, key: value} for key, options in values.items() for value in options]
    return [*single, *itertools.islice(grid(space), _MAX_CORNERS)]


def draw(space: Space, rng: random.Random) -> Choices:
    """Draw a combination at random; a loguniform range is uniform in its logarithm."""
    return {key: _draw(dimension, rng) for key, dimension in space.items()}


def draw_distinct(space: Space, count: int, rng: random.Random) -> list[Choices]:
    """Draw up to `count` distinct combinations, because two trials with the same choices would share a folder."""
    found: dict[str, Choices] = {}
    for _ in range(count * MAX_DRAWS):
        choices = draw(space, rng)
        found.setdefault(folder_name(choices), choices)
        if len(found) == count:
            break
    return list(found.values())


def _draw(dimension: list[Any] | Range, rng: random.Random) -> Any:
    if isinstance(dimension, list):
        return rng.choice(dimension)
    low, high = dimension.bounds
    if dimension.type == "integers":
        return rng.randint(int(low), int(high))
    if dimension.type == "loguniform":
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    return rng.uniform(low, high)


def lies_in(choices: Choices, space: Space) -> bool:
    """Whether a search of the space could have made these choices."""
    return choices.keys() == space.keys() and all(
        dimension.low <= choices[key] <= dimension.high if isinstance(dimension, Range) else choices[key] in dimension
        for key, dimension in space.items()
    )


def to_text(choices: Choices) -> dict[str, str]:
    """Every value as JSON text."""
    return {key: json.dumps(value) for key, value in choices.items()}


def from_text(texts: Mapping[str, Any]) -> Choices:
    """The inverse of `to_text`; numbers that a searcher drew from a range stay as they are."""
    return {key: json.loads(value) if isinstance(value, str) else value for key, value in texts.items()}


def overrides(choices: Choices) -> list[str]:
    """The choices as command line overrides."""
    return [f"{key}={json.dumps(value)}" for key, value in choices.items()]


def label(choices: Choices) -> str:
    """A short, readable text: the last part of each key with its value."""
    return ", ".join(f"{short(key, choices)} {show(value)}" for key, value in choices.items())


def show(value: Any) -> str:
    """Format a value for people."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return "-".join(map(show, value))
    if isinstance(value, dict):
        return " ".join(show(item) for item in value.values())
    return str(value)


def folder_name(choices: Choices) -> str:
    """Name of a trial's folder: readable and unique to its choices."""
    digest = hashlib.sha256(json.dumps(dict(choices), sort_keys=True).encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", label(choices)).strip("_")[:_MAX_LABEL]
    return f"{readable}-{digest}"


def short(key: str, keys: Iterable[str]) -> str:
    """The shortest suffix of a dotted key that no other key ends with."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[-count:])
        if not any(other != key and f".{other}".endswith(f".{name}") for other in keys):
            return name
    return key
