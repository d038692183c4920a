"""What a sweep over decoding choices has found: the JSON of plan.json, of summary.json and of its overview.

The keys are those on disk, where files of earlier versions may lack some.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from sweeps.reports.summaries import HowFar, Lead, TrialSummary
from sweeps.tuning.configs import Objective
from sweeps.tuning.records import Figures
from sweeps.tuning.spaces import Choices


class PlanFile(TypedDict):
    """The contents of plan.json."""

    trials: dict[str, int]
    """Number of planned trials by drafter."""
    questions: list[int]
    """Number of questions by rung."""


class BestRow(TypedDict):
    """One of the finalists of a drafter."""

    name: str
    choices: Choices
    objective: float
    spread: list[float] | None
    """95 % interval of the objective over prompts; None if unknown."""


class FinalistRow(BestRow):
    """One of the finalists of a drafter, with all figures."""

    figures: Figures


class DrafterAnswer(Lead):
    """The best way to decode with a drafter."""

    winner: Choices
    name: str
    objective: float
    spread: list[float] | None
    figures: Figures
    finalists: list[FinalistRow]
    """All that were measured side by side, best first."""
    evaluate: str
    """File for pipelines.evaluate."""


class Between(Lead):
    """The two best drafters, each with its winner."""

    best: str
    second: str


class DecodingSummary(TypedDict):
    """The contents of summary.json."""

    drafters: dict[str, DrafterAnswer]
    objective: Objective
    between: Between | None
    """None if there is only one drafter."""
    trials: list[TrialSummary]
    left_out: dict[str, dict[str, int]]
    """Number of choices that were not tried, by drafter and reason."""
    wall_seconds: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    config: Mapping[str, Any]


class DrafterOverview(TypedDict):
    """Results or progress of one drafter; winner, runner-up and file are None as long as there is no answer."""

    winner: BestRow | None
    runner_up: BestRow | None
    evaluate: str | None
    sure: Lead
    progress: HowFar


class DecodingOverview(TypedDict):
    """Results or progress of a sweep."""

    sweep: str
    objective: Objective
    complete: bool
    drafters: dict[str, DrafterOverview]
    between: Between | None
    left_out: dict[str, dict[str, int]] | None
    num_trials: int
    wall_seconds: float | None
