"""An actor that a remote worker reports its progress to and the driver reads: works on any cluster, without a
shared disk."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.exceptions

from moray.errors import MorayError
from moray.progress import Progress

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RunProgress:
    """How far a run is."""

    step: int = 0
    """Updates that are done."""
    total: int | None = None
    """Updates of the whole run; None before its workers have started."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The run's last report; empty before the first."""


@ray.remote
class ProgressActor:
    """Holds the latest progress of one run."""

    def __init__(self) -> None:
        self._latest = RunProgress()
        self._failure: MorayError | None = None
        self._warnings: list[str] = []

    def start(self, step: int, total: int) -> None:
        """A worker group has started, or started again, at `step` of `total`."""
        self._latest = RunProgress(step, total)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """`step` updates are done."""
        self._latest = replace(self._latest, step=step, metrics=metrics)

    def fail(self, error: MorayError) -> None:
        """A worker met an error that will come again however often it is restarted."""
        self._failure = self._failure or error

    def warn(self, text: str) -> None:
        """Something to tell the user that does not end the run; said once however often it comes."""
        if text not in self._warnings:
            self._warnings.append(text)

    def warnings(self, first: int) -> list[str]:
        """All warnings from the `first` on."""
        return self._warnings[first:]

    def failure(self) -> MorayError | None:
        """The error that ended the run, if one did."""
        return self._failure

    def latest(self) -> RunProgress:
        """The latest report."""
        return self._latest


@contextmanager
def follow(progress_actor: Any, title: str) -> Iterator[None]:
    """Show a progress bar that follows the actor while the block runs."""
    stop = threading.Event()
    with Progress(title, unit="updates", note="starting workers") as progress:

        def poll() -> None:
            num_warnings, stopped = 0, False
            while not stopped:
                stopped = stop.wait(_POLL_SECONDS)
                try:
                    latest: RunProgress = ray.get(progress_actor.latest.remote(), timeout=5)
                    warnings: Any = ray.get(progress_actor.warnings.remote(num_warnings), timeout=5)
                except ray.exceptions.GetTimeoutError:
                    continue  # on a busy machine the actor may be slow to answer
                except ray.exceptions.RayError:
                    return  # the cluster is going down: the run itself reports why
                for text in warnings:
                    progress.say(f"warning: {text}", style="yellow")
                num_warnings += len(warnings)
                if latest.total is not None:
                    progress.update(total=latest.total, done=latest.step, note=training_note(latest.metrics))

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=10)


def training_note(metrics: Mapping[str, float]) -> str:
    """The figures of a training's last report that people watch."""
    if not metrics:
        return ""
    return f"loss {metrics['loss']:.3f} acc {metrics['accuracy']:.3f} tau {metrics['simulated_tau']:.2f}"
