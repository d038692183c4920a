"""The trials of a sweep on disk: the single source of truth for resuming and reporting.

trials/<name>/trial.json    the trial's choices, and how it ended
trials/<name>/rungs.json    the measurements, rung by rung
trials/<name>/ ...          the folder of its distillation
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moray.provenance import read_json, write_json_atomically
from sweeps.tuning.spaces import folder_name

TRIAL_FILE, RUNGS_FILE = "trial.json", "rungs.json"

State = Literal["running", "stopped", "finished", "diverged", "failed"]
"""`stopped` by the scheduler; `finished` on the last rung; `diverged` if a loss or gradient is not finite; `failed` if
processes died too often or an error ended the trial. Failed trials are retried when the sweep is resumed."""

ENDED = ("stopped", "finished", "diverged")


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial."""

    path: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The measurements, in the order of the rungs."""
        return read_json(self.path / RUNGS_FILE) if (self.path / RUNGS_FILE).is_file() else []

    @property
    def record(self) -> dict[str, Any]:
        """Choices, state, message and start time; empty if the trial has not begun."""
        return read_json(self.path / TRIAL_FILE) if (self.path / TRIAL_FILE).is_file() else {}

    @property
    def state(self) -> State | None:
        """State of the trial; None if it has not begun."""
        return self.record.get("state")

    def begin(self, choices: Mapping[str, Any], drawn: Mapping[str, Any] | None = None) -> None:
        """Record that the trial has started or restarted; `drawn` is the searcher's proposal, if it differs."""
        first = {"choices": dict(choices), "begun": time.time()} | ({"drawn": dict(drawn)} if drawn else {})
        write_json_atomically(self.path / TRIAL_FILE, {**first, **self.record, "state": "running", "message": None})

    def add(self, row: Mapping[str, Any]) -> None:
        """Store the measurement of a rung, replacing an earlier one."""
        rows = [other for other in self.rows if other["rung"] != row["rung"]]
        write_json_atomically(self.path / RUNGS_FILE, [*rows, dict(row)])

    def end(self, state: State, message: str | None = None) -> None:
        """Record how the trial ended; has no effect on a trial that is not running.

        If the trial has ended, also remove what only further training would need, because optimiser states are larger
        than drafters.
        """
        if self.state == "running":
            write_json_atomically(self.path / TRIAL_FILE, {**self.record, "state": state, "message": message})
        if self.state in ENDED:
            shutil.rmtree(self.path / "ray", ignore_errors=True)


def trial_folder(output: str, choices: Mapping[str, Any]) -> TrialFolder:
    """The folder of the trial with these choices."""
    return TrialFolder(Path(output).absolute() / "trials" / folder_name(choices))


def trial_folders(output: str) -> list[TrialFolder]:
    """All trials that have begun, oldest first."""
    found = [TrialFolder(path.parent) for path in (Path(output).absolute() / "trials").glob(f"*/{TRIAL_FILE}")]
    return sorted(found, key=lambda folder: folder.record["begun"])
