"""Live progress of a sweep: trials report to an actor, and the driver displays it."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray
import ray.exceptions

from moray.cluster.progress_actor import RunProgress, training_note
from moray.progress import Part, Progress
from sweeps.tuning.folders import ENDED, trial_folders
from sweeps.tuning.spaces import label

_POLL_SECONDS = 1.0


class RunningTrial(NamedTuple):
    """A trial on its way to a rung."""

    rung: int
    progress_actor: Any
    """Of its training; None while it is measured."""


@ray.remote
class SweepProgressActor:
    """Keeps the current rung and the progress actor of each running trial."""

    def __init__(self) -> None:
        self._trials: dict[str, RunningTrial] = {}

    def watch(self, name: str, progress_actor: Any, rung: int) -> None:
        """Record that a trial is training for a rung, or being measured on it if `progress_actor` is None."""
        self._trials[name] = RunningTrial(rung, progress_actor)

    def forget(self, name: str) -> None:
        """Record that a trial has completed its rung."""
        self._trials.pop(name, None)

    def trials(self) -> dict[str, RunningTrial]:
        """The running trials by name."""
        return self._trials


@contextmanager
def follow_sweep(progress_actor: Any, output: str, total: int, objective: str) -> Iterator[None]:
    """Display the progress of the sweep and of each running trial while the block runs."""
    stop = threading.Event()
    ended, best = _standing(output, objective)
    with Progress("sweep", total, done=ended, unit="trials", note=best) as progress:

        def poll() -> None:
            while not stop.wait(_POLL_SECONDS):
                try:
                    running: dict[str, RunningTrial] = ray.get(progress_actor.trials.remote(), timeout=5)
                    progress.show_parts(_parts(running))
                except ray.exceptions.GetTimeoutError:
                    continue  # on a busy machine the actor may be slow to answer
                except ray.exceptions.RayError:
                    return  # the cluster is shutting down; the sweep itself reports why
                ended, best = _standing(output, objective)
                progress.update(done=ended, note=best)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=15)
            ended, best = _standing(output, objective)
            progress.update(done=ended, note=best)


def _parts(running: Mapping[str, RunningTrial]) -> dict[str, Part]:
    """Progress of each trial, by the readable part of its name, or by the full name where that is ambiguous."""
    short = {name: name.rpartition("-")[0] for name in running}
    names = {name: text if list(short.values()).count(text) == 1 else name for name, text in short.items()}
    return {names[name]: _part(trial) for name, trial in running.items()}


def _part(trial: RunningTrial) -> Part:
    rung = trial.rung
    if trial.progress_actor is None:
        return Part(note=f"rung {rung}: measuring")
    try:
        latest: RunProgress = ray.get(trial.progress_actor.latest.remote(), timeout=5)
    except ray.exceptions.GetTimeoutError:
        return Part(note=f"rung {rung}: busy")
    except ray.exceptions.RayError:
        return Part(note=f"rung {rung}: its process has died")
    if not latest.metrics:
        return Part(note=f"rung {rung}: starting")
    return Part(latest.step, latest.total, f"rung {rung}: {training_note(latest.metrics)}")


def _standing(output: str, objective: str) -> tuple[int, str]:
    """The number of trials that have ended, and a description of the best one on the highest rung."""
    folders = trial_folders(output)
    ended = sum(folder.state in ENDED for folder in folders)
    rows = [(row["rung"], row["objective"], index) for index, one in enumerate(folders) for row in one.rows[-1:]]
    if not rows:
        return ended, ""
    _, value, index = max(rows)
    return ended, f"best {objective} {value:.2f}: {label(folders[index].record['choices'])}"
