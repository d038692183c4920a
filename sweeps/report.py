"""What a sweep leaves behind: summary.json, sweep.parquet, report.html."""

from pathlib import Path
from typing import Any

import pandas as pd

from moray.provenance import write_json_atomically
from sweeps.results import Trial


def write_sweep(summary: dict[str, Any], trials: list[Trial], output: Path) -> None:
    """Write all; summary.json comes last, for it says that the sweep is complete."""
    write_tables(summary, trials, output)


def write_tables(summary: dict[str, Any], trials: list[Trial], output: Path) -> None:
    """Write sweep.parquet, then summary.json."""
    rows = [
        {"trial": trial.folder.name, "name": trial.name, "state": trial.state, **_cells(trial.choices), **_cells(row)}
        for trial in trials
        for row in trial.rows
    ]
    path = output / "sweep.parquet"
    pd.DataFrame(rows).to_parquet(path.with_suffix(".tmp"), index=False)
    path.with_suffix(".tmp").replace(path)
    write_json_atomically(output / "summary.json", summary)


def _cells(values: dict[str, Any]) -> dict[str, Any]:
    return {key: str(v) if isinstance(v, list | dict) else v for key, v in values.items() if key != "answers"}
