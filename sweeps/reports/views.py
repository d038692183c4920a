"""Views of a sweep's trials for reports: how long each was trained, the cells of a map, and the objective by value.

This module does not depend on plots or pages.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from moray.bench.reports.drawing import shorten
from sweeps.reports.results import Trial
from sweeps.tuning.configs import Objective
from sweeps.tuning.spaces import Range, Space, label, lies_in, short, show

WORDS = {"speedup": "speed-up", "tau": "tau", "tokens_per_second": "tokens per second"}
"""Names of the objectives in reports."""

_NUM_PARTS = 4  # parts that a range is divided into, to group its values
_SPACE: TypeAdapter[dict[str, list[Any] | Range]] = TypeAdapter(Space)


def read_space(values: Mapping[str, Any]) -> Space:
    """Parse a space from a summary or a run.yaml."""
    return _SPACE.validate_python(values)


def figure(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a rung's measurement; None if it is missing or not a finite number."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True)
class SearchTrials:
    """The trials of a search, with its space and objective.

    It excludes the extra trainings from other seeds that confirm the winner, and trials that began before the sweep was
    resumed with another space.
    """

    trials: Sequence[Trial]
    space: Space
    objective: Objective

    @property
    def top(self) -> float:
        """Training tokens of the highest rung that any trial has reached."""
        return max((row.get("rung_tokens", 0) for trial in self.trials for row in trial.rows), default=0.0)

    def share(self, trial: Trial) -> float:
        """A trial's training as a share of the training needed for the highest rung."""
        return trial.last.get("rung_tokens", 0.0) / self.top if self.top else 0.0

    def is_whole(self, trial: Trial) -> bool:
        """Whether a trial reached the highest rung; only such trials are comparable."""
        return bool(trial.rows) and trial.last.get("rung_tokens", 0) >= self.top

    @property
    def ranked(self) -> list[Trial]:
        """The trials with figures, sorted by training length, then by objective, best first."""
        return sorted((trial for trial in self.trials if trial.rows), key=_merit, reverse=True)

    @property
    def lists(self) -> dict[str, list[Any]]:
        """The keys with a list of at least two values."""
        return {key: values for key, values in self.space.items() if isinstance(values, list) and len(values) > 1}

    @property
    def naming(self) -> str:
        """The keys whose values make up a trial's short name."""
        return " / ".join(short(key, self.space) for key in self._varied)

    def brief(self, trial: Trial, length: int) -> str:
        """A trial's short name: its label, or only its values if not all labels fit."""
        labels = [label({key: one.choices[key] for key in self._varied}) for one in (*self.trials, trial)]
        if max(map(len, labels)) <= length:
            return shorten(labels[-1], length)
        return shorten(" / ".join(show(trial.choices[key]) for key in self._varied), length)

    @property
    def _varied(self) -> list[str]:
        return [key for key in self.space if key in self.lists or isinstance(self.space[key], Range)] or list(
            self.space
        )


def searched(trials: Iterable[Trial], space: Space, objective: Objective) -> SearchTrials:
    """Select the trials that belong to the current search from all trials of a sweep."""
    return SearchTrials([trial for trial in trials if lies_in(trial.choices, space)], space, objective)


def _merit(trial: Trial) -> tuple[float, float]:
    objective = figure(trial.last, "objective")
    return trial.last.get("rung_tokens", 0.0), -math.inf if objective is None else objective


def cells(search: SearchTrials, down: str, across: str | None) -> list[list[Trial | None]]:
    """Arrange trials in a table with a row per value of `down` and a column per value of `across` (or one column).

    If several trials share a cell, it shows the one trained longest, or the best of those.
    """
    found: dict[tuple[str, str], Trial] = {}
    for trial in search.trials:
        place = (_text(trial.choices[down]), _text(trial.choices[across]) if across else "")
        if place not in found or _merit(trial) > _merit(found[place]):
            found[place] = trial
    columns = [_text(value) for value in search.lists[across]] if across else [""]
    return [[found.get((_text(value), column)) for column in columns] for value in search.lists[down]]


def _text(value: Any) -> str:
    return json.dumps(value)


@dataclass(frozen=True)
class Worth:
    """The objective of the trials with one value of a key, or with values in one part of its range."""

    key: str
    value: str
    trials: int
    mean: float | None
    best: float | None


def common_rung(search: SearchTrials) -> int | None:
    """The highest rung that all trials with figures have reached, ignoring diverged and failed ones."""
    lasts = [
        trial.rows[-1]["rung"] for trial in search.trials if trial.rows and trial.state not in ("diverged", "failed")
    ]
    return min(lasts, default=None)


def tokens_at(search: SearchTrials, rung: int | None) -> float | None:
    """Training tokens of a rung; None if no trial has reached it."""
    return next((row.get("rung_tokens") for trial in search.trials for row in trial.rows if row["rung"] == rung), None)


def worths(search: SearchTrials, rung: int | None) -> list[Worth]:
    """The objective on one rung by value, for each key with several values; empty if no trial has reached the rung."""
    measured = [
        (trial, objective)
        for trial in search.trials
        for row in trial.rows
        if row["rung"] == rung and (objective := figure(row, "objective")) is not None
    ]
    found = []
    for key, dimension in search.space.items() if measured else ():
        if isinstance(dimension, Range):
            parts = _parts(dimension)
            names = [f"{show(low)} to {show(high)}" for low, high in parts]
            places = [_part_of(trial.choices[key], parts) for trial, _ in measured]
        elif len(dimension) > 1:
            texts = [_text(value) for value in dimension]
            names = [show(value) for value in dimension]
            places = [texts.index(_text(trial.choices[key])) for trial, _ in measured]
        else:
            continue
        for index, name in enumerate(names):
            values = [objective for place, (_, objective) in zip(places, measured, strict=True) if place == index]
            mean, best = (statistics.fmean(values), max(values)) if values else (None, None)
            found.append(Worth(key, name, len(values), mean, best))
    return found


def _parts(dimension: Range) -> list[tuple[float, float]]:
    """Divide a range into parts of equal width on its own scale."""
    ends = [at_height(dimension, part / _NUM_PARTS) for part in range(_NUM_PARTS + 1)]
    return list(itertools.pairwise(ends))


def _part_of(value: float, parts: Sequence[tuple[float, float]]) -> int:
    return next((index for index, (_, end) in enumerate(parts) if value < end), len(parts) - 1)


def height(dimension: Range, value: float) -> float:
    """Position of a value in its range, on the range's own scale: 0 at the low end, 1 at the high end."""
    low, high = dimension.low, dimension.high
    if dimension.type == "loguniform":
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def at_height(dimension: Range, share: float) -> float:
    """The inverse of `height`."""
    low, high = dimension.low, dimension.high
    return low * (high / low) ** share if dimension.type == "loguniform" else low + (high - low) * share
