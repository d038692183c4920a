"""What a sweep over sparse targets has found: the JSON of summary.json, and the table in the terminal. Without Ray."""

from collections.abc import Sequence
from typing import Any, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.reports.wording import number
from sweeps.reports.results import Trial, pareto
from sweeps.tuning.records import SparseFigures, State
from sweeps.tuning.spaces import Choices

FIGURES = ("share", "pass_share", "perplexity", "agreement")


class SparseRow(TypedDict):
    """One trial."""

    name: str
    choices: Choices
    state: State
    message: str | None
    folder: str
    """The sparse target itself, once the trial is finished."""
    figures: SparseFigures | None
    """None if it was not trained to the end."""
    is_on_front: bool
    """Whether no other trial has a lower perplexity with no more layers."""


class SparseSummary(TypedDict):
    """The contents of summary.json."""

    trials: list[SparseRow]
    """Fewest layers first; trials without figures come last."""
    training_tokens: int
    wall_seconds: float
    machine: dict[str, Any]
    versions: dict[str, str | None]
    config: dict[str, Any]


def rows_of(trials: Sequence[Trial]) -> list[SparseRow]:
    """The rows of all trials."""
    front = {one.folder for one in pareto(trials, lambda row: -_figure(row, "perplexity"), _figure)}
    rows = [_row_of(trial, trial.folder in front) for trial in trials]
    return sorted(rows, key=lambda row: (row["figures"] is None, _figure(row["figures"] or {})))


def _figure(row: Any, key: str = "share") -> float:
    return row.get(key, 0.0)


def _row_of(trial: Trial, is_on_front: bool) -> SparseRow:
    last: Any = trial.last
    return {
        "name": trial.name,
        "choices": trial.choices,
        "state": trial.state,
        "message": trial.message,
        "folder": str(trial.folder),
        "figures": {key: last[key] for key in (*FIGURES, "dense_perplexity")} if trial.rows else None,  # type: ignore[typeddict-item]
        "is_on_front": is_on_front,
    }


def print_sparse_summary(summary: SparseSummary, console: Console) -> None:
    """Print the trials."""
    table = Table(title="Sparse targets", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("trial", overflow="fold")
    for column in ("share", "pass", "perplexity", "agreement", "front"):
        table.add_column(column, justify="right")
    rows = summary["trials"]
    for row in rows:
        figures = row["figures"]
        cells = [number(figures[key], 3) for key in FIGURES] if figures else [row["state"], *[""] * 3]
        table.add_row(row["name"], *cells, "yes" if row["is_on_front"] else "")
    console.print(table)
    for row in rows:
        if row["message"]:
            console.print(f"{row['name']}: {row['state']}: {row['message']}", markup=False, highlight=False)
    dense = next(row["figures"]["dense_perplexity"] for row in rows if row["figures"])
    console.print(
        f"The dense target's perplexity is {number(dense, 3)}. pass is the share of the layers that a pass over eight "
        "tokens in a row reads. Trials on the front have no other one with a lower perplexity and no more layers. Each "
        "trial's folder is a target.",
        highlight=False,
    )
