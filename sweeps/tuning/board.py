"""What a sweep's trials are doing now: they pin it to a board, and the driver shows it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from sweeps.tuning.folders import ENDED, trial_folders
from sweeps.tuning.spaces import label

_POLL_SECONDS = 1.0


@ray.remote
class SweepBoard:
    """Knows the boards of the trials that are training."""

    def __init__(self) -> None:
        self._trials: dict[str, tuple[int, Any]] = {}

    def watch(self, name: str, board: Any, rung: int) -> None:
        """A trial trains, or is measured (without a board), on its way to a rung."""
        self._trials[name] = (rung, board)

    def forget(self, name: str) -> None:
        """A trial has come to its rung."""
        self._trials.pop(name, None)

    def trials(self) -> dict[str, tuple[int, Any]]:
        """Rung and board by trial."""
        return self._trials


@contextmanager
def follow_sweep(board: Any, output: str, total: int, objective: str) -> Iterator[None]:
    """Show how far the sweep and each running trial are while the block runs."""
    stop = threading.Event()
    how_far = TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True, min_width=5))
    notes = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(12), how_far, TimeElapsedColumn(), notes)
    with Progress(*columns) as bar:
        whole = bar.add_task("trials", total=total, note="")
        lines: dict[str, Any] = {}

        def poll() -> None:
            while not stop.wait(_POLL_SECONDS):
                try:
                    running: Any = ray.get(board.trials.remote(), timeout=5)
                    _show_trials(bar, lines, running)
                except ray.exceptions.RayError:
                    return  # the cluster is going down: the sweep itself reports why
                ended, best = _standing(output, objective)
                bar.update(whole, completed=ended, note=best)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=15)
            for line in lines.values():
                bar.remove_task(line)
            ended, best = _standing(output, objective)
            bar.update(whole, completed=ended, note=best)


def _show_trials(bar: Progress, lines: dict[str, Any], running: dict[str, tuple[int, Any]]) -> None:
    for name in lines.keys() - running.keys():
        bar.remove_task(lines.pop(name))
    for name, (rung, board) in running.items():
        if name not in lines:
            lines[name] = bar.add_task(f"  {name.rpartition('-')[0]}", total=1, note="")
        if board is None:
            bar.update(lines[name], note=f"rung {rung}: measuring")
            continue
        try:
            latest: Any = ray.get(board.latest.remote(), timeout=5)
        except ray.exceptions.RayError:
            bar.update(lines[name], note=f"rung {rung}: its process has died")
            continue
        metrics = latest["metrics"]
        note = f"rung {rung}: loss {metrics['loss']:.3f}" if metrics else f"rung {rung}: starting"
        bar.update(lines[name], total=latest["total"] or 1, completed=latest["step"], note=note)


def _standing(output: str, objective: str) -> tuple[int, str]:
    """How many trials have ended, and which is the best of the highest rung."""
    folders = trial_folders(output)
    ended = sum(folder.state in ENDED for folder in folders)
    rows = [(row["rung"], row["objective"], index) for index, one in enumerate(folders) for row in one.rows[-1:]]
    if not rows:
        return ended, ""
    _, value, index = max(rows)
    return ended, f"best {objective} {value:.2f}: {label(folders[index].record['choices'])}"
