"""A run's metrics: JSON Lines on disk, and TensorBoard and trackers for people.

metrics.jsonl      one row per report of training
validation.jsonl   one row per validated checkpoint, written by the process that validates
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moray.distill.loop import Progress
from moray.distill.tracking.sinks import Sink, TensorBoard
from moray.provenance import write_text_atomically

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
_SENT_FILE = "validation_sent.json"


class MetricsWriter:
    """Appends one row per report; a resumed run first drops the rows that it is about to repeat."""

    def __init__(self, folder: Path, first_step: int, trackers: Sequence[Sink] = ()) -> None:
        """
        Args:
            folder: of the run.
            first_step: number of updates made before.
            trackers: also receive every row, including validation; closed with this writer.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        kept = [row for row in read_metrics(folder) if row["step"] <= first_step]
        write_text_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._folder = folder
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers
        self._sinks: list[Sink] = [TensorBoard(folder / "tensorboard", first_step + 1), *trackers]

    def write(self, progress: Progress, metrics: dict[str, float]) -> None:
        """Record the metrics of a finished update, and the run's cost so far."""
        cost = {"tokens": progress.tokens, "seconds": progress.seconds}
        self._file.write(json.dumps({"step": progress.step, **cost, **metrics}) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(progress.step, _named("train", metrics | cost))
        send_validation(self._folder, self._trackers)

    def close(self) -> None:
        """Flush and close the file and all sinks."""
        self._file.close()
        for sink in self._sinks:
            sink.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run so far, without a half-written last row (of a run that was killed)."""
    return _read_rows(folder / METRICS_FILE)


def read_validation(folder: Path) -> list[dict[str, Any]]:
    """The metrics of every validated checkpoint of a run, by step."""
    return _read_rows(folder / VALIDATION_FILE)


def read_learning(folder: Path) -> list[dict[str, Any]]:
    """The metrics of every validated checkpoint, with the tokens and seconds of training up to it, by step."""
    rows = read_metrics(folder)
    steps = [row["step"] for row in rows]
    learned = []
    for figures in read_validation(folder):
        place = bisect_right(steps, figures["step"]) - 1
        if place >= 0:
            learned.append({"tokens": rows[place]["tokens"], "seconds": rows[place]["seconds"]} | figures)
    return learned


def write_validation(folder: Path, row: Mapping[str, Any]) -> None:
    """Add the metrics of a checkpoint, identified by "step"; an earlier row of that step is replaced. Not for several
    processes at once."""
    rows = [other for other in read_validation(folder) if other["step"] != row["step"]]
    rows = sorted([*rows, dict(row)], key=lambda other: other["step"])
    write_text_atomically(folder / VALIDATION_FILE, "".join(json.dumps(each) + "\n" for each in rows))
    events = TensorBoard(folder / "tensorboard" / "validation")  # two processes must not write to one folder
    events.write(int(row["step"]), _named("validation", row))
    events.close()


def send_validation(folder: Path, trackers: Sequence[Sink]) -> None:
    """Send trackers the validated checkpoints that were not sent yet."""
    if not trackers or not (folder / VALIDATION_FILE).is_file():
        return
    path = folder / _SENT_FILE
    sent: list[int] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    new = [row for row in read_validation(folder) if row["step"] not in sent]
    for row in new:
        for tracker in trackers:
            tracker.write(row["step"], _named("validation", row))
    if new:
        write_text_atomically(path, json.dumps([*sent, *(row["step"] for row in new)]))


def _named(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {f"{group}/{name}": float(value) for name, value in values.items() if name != "step"}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
