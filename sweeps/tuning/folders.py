"""The trials of a sweep on disk: the single source of truth for resuming and reporting.

trials/<name>/trial.json    the trial's choices, and how it ended
trials/<name>/rungs.json    the measurements, rung by rung
trials/<name>/ ...          the folder of its distillation
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from moray.provenance import read_json, write_json_atomically
from sweeps.tuning.records import State, TrialRecord, TrialRow
from sweeps.tuning.spaces import Choices, folder_name

TRIAL_FILE, RUNGS_FILE = "trial.json", "rungs.json"

ENDED = ("stopped", "finished", "diverged")


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial."""

    path: Path

    @property
    def rows(self) -> list[TrialRow]:
        """The measurements, in the order of the rungs."""
        return read_json(self.path / RUNGS_FILE) if (self.path / RUNGS_FILE).is_file() else []

    @property
    def record(self) -> TrialRecord:
        """Choices, state, message and start time.

        Raises:
            DataError: the trial has not begun.
        """
        return read_json(self.path / TRIAL_FILE)

    @property
    def has_begun(self) -> bool:
        """Whether there is a record of the trial."""
        return (self.path / TRIAL_FILE).is_file()

    @property
    def state(self) -> State | None:
        """State of the trial; None if it has not begun."""
        return self.record["state"] if self.has_begun else None

    def begin(self, choices: Choices, drawn: Choices | None = None) -> None:
        """Record that the trial has started or restarted; `drawn` is the searcher's proposal, if it differs."""
        record: TrialRecord = (
            {**self.record, "state": "running", "message": None}
            if self.has_begun
            else {"choices": dict(choices), "begun": time.time(), "state": "running", "message": None}
        )
        if drawn and "drawn" not in record:
            record["drawn"] = dict(drawn)
        self._write(record)

    def add(self, row: TrialRow) -> None:
        """Store the measurement of a rung, replacing an earlier one."""
        rows = [other for other in self.rows if other["rung"] != row["rung"]]
        write_json_atomically(self.path / RUNGS_FILE, [*rows, row])

    def end(self, state: State, message: str | None = None) -> None:
        """Record how the trial ended; has no effect on a trial that is not running.

        If the trial has ended, also remove what only further training would need, because optimiser states are larger
        than drafters.
        """
        if self.state == "running":
            self._write({**self.record, "state": state, "message": message})
        if self.state in ENDED:
            shutil.rmtree(self.path / "ray", ignore_errors=True)

    def _write(self, record: TrialRecord) -> None:
        write_json_atomically(self.path / TRIAL_FILE, record)


def trial_folder(output: str, choices: Choices) -> TrialFolder:
    """The folder of the trial with these choices."""
    return TrialFolder(Path(output).absolute() / "trials" / folder_name(choices))


def trial_folders(output: str) -> list[TrialFolder]:
    """All trials that have begun, oldest first."""
    found = [TrialFolder(path.parent) for path in (Path(output).absolute() / "trials").glob(f"*/{TRIAL_FILE}")]
    return sorted(found, key=lambda folder: folder.record["begun"])
