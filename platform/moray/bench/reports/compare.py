"""Compares two reports: what changed between two evaluations, and what limits the comparison.

Rows are matched by drafter, tree and temperature. This module does not depend on how a report was produced and imports
neither torch nor ray.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moray.bench.reports.schema import CategoryMean, CategoryRow, Measure, Report, ResultRow, RowKey, read_report
from moray.bench.reports.wording import number, percent, temperature, times
from moray.config import Config, flatten
from moray.errors import ConfigError, DataError
from moray.explain import one_line
from moray.provenance import write_json_atomically

_MAX_LETTERS = 60

_MEANT_TO_DIFFER = (
    "begun", "git", "output", "drafters", "trees", "temperatures", "sampling.temperature", "memory_gib",
    "fingerprints.drafter", "fingerprints.machine", "fingerprints.torch",
)  # fmt: skip
"""Keys and groups of keys whose differences are not reported.

They identify rows, are what the comparison is about, or repeat other keys.
"""

_BETTER_KEYS = {
    "questions": "fingerprints.questions",
    "target.model": "fingerprints.target",
    "target.template": "fingerprints.text",
}
"""Path keys that are ignored if both reports have the fingerprint of the file."""


class Pair(Config):
    """One figure in both reports; the ratio is b / a."""

    a: Measure
    b: Measure
    ratio: Measure


class ComparedRow(Config):
    """One drafter with one tree at one temperature in both reports."""

    drafter: str
    tree: str
    temperature: Measure
    tau: Pair
    speedup_vs_plain: Pair
    efficiency: Pair
    num_prompts: tuple[int, int]


class ComparedCategory(Config):
    """One category of such a row in both reports; "mean" is the plain mean if both have the same categories."""

    category: str
    drafter: str
    tree: str
    temperature: Measure
    tau: Pair
    speedup_vs_plain: Pair


class Difference(Config):
    """One setting or machine property that differs."""

    key: str
    a: Any
    b: Any


class Comparison(Config):
    """The rows that two reports have in common, and the differences that limit the comparison."""

    a: str
    b: str
    rows: tuple[ComparedRow, ...]
    categories: tuple[ComparedCategory, ...]
    only_in_a: tuple[RowKey, ...]
    only_in_b: tuple[RowKey, ...]
    machine: tuple[Difference, ...]
    settings: tuple[Difference, ...]
    """Differences in versions, questions, lengths and other settings."""


def compare(a: Path, b: Path) -> Comparison:
    """Compare two files that an evaluation wrote.

    Raises:
        ConfigError: a file is missing or is not a report.
    """
    reports = _read(a), _read(b)
    rows_a, rows_b = ({row.key: row for row in report.rows} for report in reports)
    return Comparison(
        a=str(a),
        b=str(b),
        rows=tuple(_compare_rows(row, rows_b[key]) for key, row in rows_a.items() if key in rows_b),
        categories=_compare_categories(*reports),
        only_in_a=tuple(key for key in rows_a if key not in rows_b),
        only_in_b=tuple(key for key in rows_b if key not in rows_a),
        machine=_differences(reports[0].machine, reports[1].machine),
        settings=_differences(reports[0].settings, reports[1].settings),
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the tables, then everything that limits the comparison."""
    console.print(_table(comparison.rows))
    if comparison.categories:
        console.print(_category_table(comparison.categories))
    for name, path, keys in (("a", comparison.a, comparison.only_in_a), ("b", comparison.b, comparison.only_in_b)):
        console.print(Text(f"{name}: {path}"))
        for drafter, tree, value in keys:
            console.print(Text(f"   only there: {drafter}, {tree}, T {temperature(value)}"))
    for note in _notes(comparison):
        console.print(Text(f"note: {note}"))


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the comparison as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_json_atomically(path, comparison.model_dump(mode="json"))
    except OSError as error:
        raise ConfigError(
            f"the comparison cannot be written to '{path}': {error.strerror}; name another file"
        ) from None


def _read(path: Path) -> Report:
    try:
        return read_report(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError
        reason = f"is not valid JSON: {one_line(str(error))}"
    except DataError as error:
        reason = f"is no report ({error})"
    raise ConfigError(f"compare: '{path}' {reason}; name a report.json that pipelines.evaluate wrote")


def _compare_rows(a: ResultRow, b: ResultRow) -> ComparedRow:
    return ComparedRow(
        drafter=a.drafter,
        tree=a.tree,
        temperature=a.temperature,
        tau=_pair(a.tau, b.tau),
        speedup_vs_plain=_pair(a.speedup_vs_plain, b.speedup_vs_plain),
        efficiency=_pair(a.efficiency, b.efficiency),
        num_prompts=(a.num_prompts, b.num_prompts),
    )


def _compare_categories(a: Report, b: Report) -> tuple[ComparedCategory, ...]:
    """Compare the categories that both reports measured, row by row, followed by the mean of each row."""
    compared, groups_b = [], b.category_groups
    means_a, means_b = ({mean.key: mean for mean in report.category_means} for report in (a, b))
    for key, rows in a.category_groups.items():
        theirs = groups_b.get(key, {})
        compared += [_compare_category(name, row, theirs[name]) for name, row in rows.items() if name in theirs]
        if rows.keys() == theirs.keys():
            compared.append(_compare_category("mean", means_a[key], means_b[key]))
    return tuple(compared)


def _compare_category(name: str, a: CategoryRow | CategoryMean, b: CategoryRow | CategoryMean) -> ComparedCategory:
    return ComparedCategory(
        category=name,
        drafter=a.drafter,
        tree=a.tree,
        temperature=a.temperature,
        tau=_pair(a.tau, b.tau),
        speedup_vs_plain=_pair(a.speedup_vs_plain, b.speedup_vs_plain),
    )


def _pair(a: Measure, b: Measure) -> Pair:
    return Pair(a=a, b=b, ratio=None if a is None or b is None or not a else b / a)


def _table(rows: Sequence[ComparedRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = None if rows else "the reports have no row in common"
    for name in ("drafter", "tree"):
        table.add_column(name, overflow="fold", min_width=7)
    for name in ("T", "tau a", "tau b", "b / a", "vs plain a", "vs plain b", "b / a", "eff. a", "eff. b"):
        table.add_column(name, justify="right")
    for row in rows:
        tau, speedup, efficiency = row.tau, row.speedup_vs_plain, row.efficiency
        table.add_row(
            Text(row.drafter), Text(row.tree), temperature(row.temperature),
            number(tau.a), number(tau.b), number(tau.ratio),
            times(speedup.a), times(speedup.b), number(speedup.ratio),
            percent(efficiency.a), percent(efficiency.b),
        )  # fmt: skip
    return table


def _category_table(rows: Sequence[ComparedCategory]) -> Table:
    table = Table(title="By category, b / a", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("drafter", "tree"):
        table.add_column(name, overflow="fold", min_width=7)
    table.add_column("T", justify="right")
    table.add_column("category", overflow="fold")
    for name in ("tau", "vs plain"):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = number(row.tau.ratio), number(row.speedup_vs_plain.ratio)
        table.add_row(
            Text(row.drafter), Text(row.tree), temperature(row.temperature), Text(row.category), *ratios,
            end_section=row.category == "mean",
        )  # fmt: skip
    return table


def _notes(comparison: Comparison) -> list[str]:
    """Notes on what limits the comparison."""
    notes = []
    if comparison.machine:
        listed = "; ".join(map(_word, comparison.machine))
        notes.append(
            f"the machines differ ({listed}): tau and speed-ups are ratios within one run and can be compared with "
            "care, tokens per second cannot"
        )
    notes += [f"not the same: {_word(difference)}" for difference in comparison.settings]
    uneven = [row for row in comparison.rows if row.num_prompts[0] != row.num_prompts[1]]
    if uneven:
        a, b = uneven[0].num_prompts
        notes.append(
            f"{len(uneven)} of {len(comparison.rows)} rows have another number of prompts, such as {a} and {b}"
        )
    return notes


def _word(difference: Difference) -> str:
    return f"{difference.key} {_cut(difference.a)} and {_cut(difference.b)}"


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_LETTERS else text[:12] + "…"


def _differences(a: dict[str, Any], b: dict[str, Any]) -> tuple[Difference, ...]:
    """The keys that both reports have with different values; an older report may lack some keys."""
    flat_a, flat_b = flatten(a), flatten(b)
    both = [key for key in flat_a if key in flat_b]
    return tuple(
        Difference(key=key, a=flat_a[key], b=flat_b[key])
        for key in both
        if flat_a[key] != flat_b[key]
        and _BETTER_KEYS.get(key) not in both
        and not any(key == name or key.startswith(f"{name}.") for name in _MEANT_TO_DIFFER)
    )
