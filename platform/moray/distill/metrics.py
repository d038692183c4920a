"""Training metrics on disk: JSON Lines for reports, TensorBoard for people."""

import json
from pathlib import Path
from typing import Any

from moray.distill.loop import Progress
from moray.provenance import write_text_atomically

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends one row per report; a resumed run first drops the rows it is about to repeat."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        kept = [row for row in read_metrics(folder) if row["step"] <= first_step]
        write_text_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Record the metrics of a finished update, and what the run has cost so far."""
        cost = {"tokens": progress.tokens, "seconds": progress.seconds}
        self._file.write(json.dumps({"step": progress.step, **cost, **metrics}) + "\n")
        self._file.flush()
        for name, value in (metrics | cost).items():
            self._board.add_scalar(f"train/{name}", value, progress.step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run so far; a half-written last row (the run was killed) is left out."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
