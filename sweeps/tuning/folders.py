"""What a sweep keeps of its trials on disk: the one truth, from which it goes on and reports.

trials/<name>/trial.json    its choices, and how it ended
trials/<name>/rungs.json    what was measured, rung by rung
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
its processes died too often or something spoke against it, and then tried again on resumption."""

ENDED = ("stopped", "finished", "diverged")


@dataclass(frozen=True)
class TrialFolder:
    """What is kept of a trial."""

    path: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured, in the order of the rungs."""
        return read_json(self.path / RUNGS_FILE) if (self.path / RUNGS_FILE).is_file() else []

    @property
    def record(self) -> dict[str, Any]:
        """Choices, state, message, and when it began; empty if it has not."""
        return read_json(self.path / TRIAL_FILE) if (self.path / TRIAL_FILE).is_file() else {}

    @property
    def state(self) -> State | None:
        """How far it is; None if it has not begun."""
        return self.record.get("state")

    def begin(self, choices: Mapping[str, Any], drawn: Mapping[str, Any] | None = None) -> None:
        """Note that it runs, now or again; `drawn` is what a searcher had proposed, where that is not the choices."""
        first = {"choices": dict(choices), "begun": time.time()} | ({"drawn": dict(drawn)} if drawn else {})
        write_json_atomically(self.path / TRIAL_FILE, {**first, **self.record, "state": "running", "message": None})

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep what was measured on a rung."""
        rows = [other for other in self.rows if other["rung"] != row["rung"]]
        write_json_atomically(self.path / RUNGS_FILE, [*rows, dict(row)])

    def end(self, state: State, message: str | None = None) -> None:
        """Note how it ended. What has ended already stays as it did, whatever a scheduler says later.

        What only further training would need is removed: optimiser states are larger than drafters.
        """
        if self.state == "running":
            write_json_atomically(self.path / TRIAL_FILE, {**self.record, "state": state, "message": message})
        if self.state in ENDED:
            shutil.rmtree(self.path / "ray", ignore_errors=True)


def trial_folder(output: str, choices: Mapping[str, Any]) -> TrialFolder:
    """The folder of the trial with these choices."""
    return TrialFolder(Path(output).absolute() / "trials" / folder_name(choices))


def trial_folders(output: str) -> list[TrialFolder]:
    """All trials that have begun, first come first."""
    found = [TrialFolder(path.parent) for path in (Path(output).absolute() / "trials").glob(f"*/{TRIAL_FILE}")]
    return sorted(found, key=lambda folder: folder.record["begun"])
