"""What a sweep over sparse targets has found: the JSON of summary.json, and the table in the terminal. Without Ray."""

from collections.abc import Sequence
from typing import Any, TypedDict, cast

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.reports.wording import number
from sweeps.reports.results import Trial
from sweeps.tuning.records import SparseFigures, State
from sweeps.tuning.spaces import Choices

FIGURES = ("share", "kv_share", "pass_share", "perplexity", "agreement")


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


class SparseSummary(TypedDict):
    """The contents of summary.json."""

    trials: list[SparseRow]
    front: list[str]
    """Names of the trials of which no other one has a lower perplexity with no more layers, fewest layers first."""
    training_tokens: int
    wall_seconds: float
    machine: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]


def row_of(trial: Trial) -> SparseRow:
    """The row of a trial."""
    figures = cast(SparseFigures, trial.last) if trial.rows else None
    kept: Any = None if figures is None else {key: figures[key] for key in (*FIGURES, "dense_perplexity")}
    return {
        "name": trial.name,
        "choices": trial.choices,
        "state": trial.state,
        "message": trial.message,
        "folder": str(trial.folder),
        "figures": kept,
    }


def front_of(rows: Sequence[SparseRow]) -> list[str]:
    """The trials that no other one beats in both share and perplexity, fewest layers first."""
    known = [(row["figures"]["share"], row["figures"]["perplexity"], row["name"]) for row in rows if row["figures"]]
    front: list[str] = []
    lowest = float("inf")
    for _, perplexity, name in sorted(known):
        if perplexity < lowest:
            lowest = perplexity
            front.append(name)
    return front


def print_sparse_summary(summary: SparseSummary, console: Console) -> None:
    """Print the trials, fewest layers first."""
    table = Table(title="Sparse targets", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("trial", overflow="fold")
    for column in ("share", "KV", "pass", "perplexity", "agreement", "front"):
        table.add_column(column, justify="right")
    rows = sorted(summary["trials"], key=lambda row: row["figures"]["share"] if row["figures"] else 2.0)
    for row in rows:
        figures = row["figures"]
        cells = [number(figures[key], 3) for key in FIGURES] if figures else [row["state"], *[""] * 4]
        table.add_row(row["name"], *cells, "yes" if row["name"] in summary["front"] else "")
    console.print(table)
    for row in rows:
        if row["message"]:
            console.print(f"{row['name']}: {row['state']}: {row['message']}", markup=False, highlight=False)
    dense = next(row["figures"]["dense_perplexity"] for row in rows if row["figures"])
    console.print(
        f"the dense target's perplexity is {number(dense, 3)}; pass: layers that a pass over eight tokens in a row "
        "reads; front: no other trial has a lower perplexity with no more layers; each trial's folder is a target",
        highlight=False,
    )
