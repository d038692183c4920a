"""The schema of report.json: the figures that an evaluation writes, and their names.

Other programs read the file, so keys may be added but are rarely renamed; reports with old names can still be read. A
figure that was not measured or is not finite (NaN, infinity) is null. This module does not depend on how figures are
measured or shown, and imports neither torch nor ray.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from moray.config import Config
from moray.errors import ConfigError, DataError
from moray.renamed import with_current_names

Measure = float | None
Count = Annotated[int, Field(ge=0)]
RowKey = tuple[str, str, Measure]
"""Drafter, tree and temperature, which identify a row."""


class Phases(Config):
    """Milliseconds of an average cycle, by phase."""

    propose: Measure = None
    verify: Measure = None
    accept: Measure = None
    commit: Measure = None
    observe: Measure = None
    other: Measure = None


class ResultRow(Config):
    """One drafter with one tree at one temperature."""

    drafter: str
    tree: str
    temperature: Measure = 0.0
    tau: Measure  # tokens emitted per target pass, bonus token included
    tokens_per_second: Measure
    speedup_vs_plain: Measure
    speedup_vs_generate: Measure
    efficiency: Measure  # speedup_in_cycles / (tau / (1 + draft_steps * draft_cost))
    lossless: bool | None  # null if it was not checked
    num_prompts: Count
    num_tokens: Count
    speedup_in_cycles: Measure = None  # over plain decoding, prefill left out on both sides
    draft_steps: Measure = None  # gamma, per cycle
    draft_cost: Measure = None  # c: one draft step / one plain target step
    verify_cost: Measure = None  # v: one verify pass / one plain target step
    acceptance_by_position: tuple[Measure, ...] = ()  # [k]: P(depth k + 1 accepted | depth k accepted)
    depth_shares: tuple[Measure, ...] = ()  # [k]: share of cycles that drafted k levels; [0] drafted nothing
    layer_count_shares: dict[str, Measure] = Field(default_factory=dict)  # shares of drafting cycles, by drafter's N
    phases_ms: Phases | None = None
    tau_spread: tuple[Measure, Measure] | None = None  # 95 % interval of tau, by bootstrap over prompts
    speedup_spread: tuple[Measure, Measure] | None = None  # 95 % interval of speedup_vs_plain, likewise
    speedup_median: Measure = None  # median of the per-prompt speed-ups over plain decoding
    speedup_quartiles: tuple[Measure, Measure] | None = None  # 25 % and 75 % points of the same
    trainable_parameters: Count | None = None  # of the drafter
    training_tokens: Count | None = None  # tokens the drafter was trained on, counting repetitions
    training_seconds: Measure = None

    renamed: ClassVar[Mapping[str, str]] = {"effort_shares": "layer_count_shares"}

    @property
    def key(self) -> RowKey:
        """The key that identifies this row."""
        return self.drafter, self.tree, self.temperature

    @property
    def ideal_speedup(self) -> Measure:
        """tau / (1 + gamma*c): the speed-up if verifying cost one plain step and everything else nothing."""
        if self.tau is None or self.draft_steps is None or self.draft_cost is None:
            return None
        return self.tau / (1 + self.draft_steps * self.draft_cost)


class Baseline(Config):
    """Decoding without a drafter: "plain" is our own loop, "generate" is Hugging Face's."""

    name: str
    temperature: Measure = None
    tokens_per_second: Measure


class CategoryRow(Config):
    """One drafter with one tree at one temperature on the questions of one category."""

    category: str
    drafter: str
    tree: str
    temperature: Measure = 0.0
    tau: Measure
    speedup_vs_plain: Measure
    speedup_vs_generate: Measure = None
    num_prompts: Count
    num_tokens: Count

    @property
    def key(self) -> RowKey:
        """The `ResultRow.key` of the same drafter, tree and temperature."""
        return self.drafter, self.tree, self.temperature


class CategoryMean(Config):
    """The plain means over the categories of one drafter, tree and temperature; each category counts once."""

    drafter: str
    tree: str
    temperature: Measure = 0.0
    tau: Measure
    speedup_vs_plain: Measure
    num_categories: Count

    @property
    def key(self) -> RowKey:
        """The `ResultRow.key` of the same drafter, tree and temperature."""
        return self.drafter, self.tree, self.temperature


class Report(Config):
    """All results of an evaluation.

    `training` and `validation` map a drafter to its series, each as long as the series "step". `validation` has a value
    for every checkpoint measured on held-out chats during training, with "tokens" and "seconds" up to that point.
    """

    rows: tuple[ResultRow, ...]
    baselines: tuple[Baseline, ...] = ()
    categories: tuple[CategoryRow, ...] = ()
    category_means: tuple[CategoryMean, ...] = ()  # `read_report` computes them from `categories`
    training: dict[str, dict[str, tuple[Measure, ...]]] = Field(default_factory=dict)
    validation: dict[str, dict[str, tuple[Measure, ...]]] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def temperatures(self) -> list[Measure]:
        """All temperatures measured."""
        return list(dict.fromkeys(row.temperature for row in (*self.rows, *self.categories)))

    @property
    def category_groups(self) -> dict[RowKey, dict[str, CategoryRow]]:
        """The rows of each drafter, tree and temperature by category."""
        groups: dict[RowKey, dict[str, CategoryRow]] = {}
        for row in self.categories:
            groups.setdefault(row.key, {})[row.category] = row
        return groups

    @model_validator(mode="after")
    def _check_all_series(self) -> "Report":
        for drafter, series in self.training.items():
            _check_series(f"training of '{drafter}'", series, ["step"])
        for drafter, series in self.validation.items():
            _check_series(f"validation of '{drafter}'", series, ["step", "tokens", "seconds"])
        return self


def _check_series(title: str, series: Mapping[str, Sequence[Measure]], required: Sequence[str]) -> None:
    """Refuse series of different lengths, or missing ones that are required."""
    for name in required:
        if name not in series:
            raise ValueError(f"{title} has no series '{name}'")
    expected = len(series["step"])
    for name, values in series.items():
        if len(values) != expected:
            raise ValueError(
                f"{title}: '{name}' has {len(values)} values but 'step' has {expected};"
                f" put null where nothing was measured"
            )


def read_report(values: dict[str, Any] | Report) -> Report:
    """Validate a report given as plain values, which may include NaN and numpy scalars.

    Raises:
        DataError: the values do not match the schema; the message names the first problem.
    """
    if isinstance(values, Report):
        return values
    try:
        report = Report.model_validate_json(json.dumps(with_current_names(Report, _plain(values), notice=False)))
    except ConfigError as error:
        raise DataError(str(error)) from None
    except ValidationError as error:
        raise DataError(_explain(error)) from None
    means = [_mean_over(key, list(rows.values())) for key, rows in report.category_groups.items()]
    return report.model_copy(update={"category_means": tuple(means)})


def _mean_over(key: RowKey, rows: Sequence[CategoryRow]) -> CategoryMean:
    drafter, tree, temperature = key
    return CategoryMean(
        drafter=drafter,
        tree=tree,
        temperature=temperature,
        tau=_mean([row.tau for row in rows]),
        speedup_vs_plain=_mean([row.speedup_vs_plain for row in rows]),
        num_categories=len(rows),
    )


def _mean(values: Sequence[Measure]) -> Measure:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _plain(value: Any) -> Any:
    """Convert a value to what JSON can represent: null for NaN and infinity, lists for arrays, text for the rest."""
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy and torch scalars and arrays, without importing either
        return _plain(value.tolist())
    return _text(value)


def _text(value: Any) -> str:
    # A lone surrogate, for example from an unusual file name, cannot be encoded as UTF-8.
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    problem = problems[0]
    location = ".".join(str(part) for part in problem["loc"])
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    if problem["type"] == "value_error":
        return f"report: {problem['msg'].removeprefix('Value error, ')}{more}"
    if problem["type"] == "missing":
        return f"report: '{location}' is missing; give it, null if it was not measured{more}"
    if problem["type"] == "extra_forbidden":
        return f"report: unknown key '{location}'; moray.bench.reports.schema lists the keys{more}"
    received = json.dumps(problem["input"])[:80]
    return f"report: '{location}' is {received}: {problem['msg'][0].lower()}{problem['msg'][1:]}{more}"
