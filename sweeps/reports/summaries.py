"""What a sweep of trainings has found: the JSON of summary.json and of its overview.

The keys are those on disk, where files of earlier versions may lack some. `sweeps.decoding.summaries` does the same for
sweeps over decoding choices.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from sweeps.tuning.configs import Objective
from sweeps.tuning.records import Figures, LastFigures, State
from sweeps.tuning.spaces import Choices


class Lead(TypedDict):
    """How far the best finalist is ahead of the second; all None if there is no second."""

    ahead_by: float | None
    ahead_interval: list[float] | None
    """95 % interval of `ahead_by`."""
    stays_ahead: float | None
    """Share of resamples in which the best stays ahead."""


class RankedFinalist(TypedDict):
    """A finalist, measured side by side with the others."""

    name: str
    choices: Choices
    mean: float
    """Objective, averaged over seeds."""
    spread: list[float]
    """Lowest and highest objective of the seeds."""
    seeds: dict[str, Figures]


class HowSure(Lead):
    """The finalists, best first, and how certain the lead of the best is."""

    finalists: list[RankedFinalist]


class RankAgreement(TypedDict):
    """How well the ranking on one rung predicted the ranking on the last one."""

    rung: int
    rung_tokens: int | None
    trials: int
    """Trials that reached both rungs."""
    spearman: float | None
    same_best: bool


class TrialSummary(TypedDict):
    """One trial."""

    name: str
    choices: Choices
    state: State
    message: str | None
    training_tokens: int
    folder: str
    figures: LastFigures


class Winner(TypedDict):
    """The best finalist."""

    name: str
    choices: Choices
    objective: float
    spread: list[float]
    folder: str


class Summary(TypedDict):
    """The contents of summary.json."""

    winner: Winner
    objective: Objective
    sure: HowSure
    ranks: list[RankAgreement]
    trials: list[TrialSummary]
    training_tokens: int
    search_tokens: int
    """Training tokens of the trials of the current search alone."""
    wall_seconds: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    config: Mapping[str, Any]


class Leader(TypedDict):
    """The best trial so far."""

    name: str
    rung: int
    objective: float


class HowFar(TypedDict):
    """The progress of a search."""

    planned: int | None
    begun: int
    ended: int
    states: dict[str, int]
    """Number of trials by state."""
    rungs: int
    worked_on: bool
    """Whether a process works on the sweep now."""
    leader: Leader | None


class RunnerUp(TypedDict):
    """The second-best finalist."""

    name: str
    choices: Choices
    mean: float
    spread: list[float]


class WorthRow(TypedDict):
    """The fields of a `sweeps.reports.views.Worth`."""

    key: str
    value: str
    trials: int
    mean: float | None
    best: float | None


class Overview(TypedDict):
    """Results or progress of a sweep."""

    sweep: str
    objective: Objective
    complete: bool
    winner: Winner | None
    runner_up: RunnerUp | None
    sure: Lead
    progress: HowFar
    num_trials: int
    training_tokens: int
    wall_seconds: float | None
    worth_rung: int | None
    worth_tokens: float | None
    worths: list[WorthRow]
