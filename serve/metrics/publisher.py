"""Publishes a replica's counts to a sink once a second.

The counts are plain numbers that only grow, written in one thread and read here from another. A reading may be slightly
old, or catch only one of two related counts; the next reading makes up for it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve.metrics.series import Series
from serve.metrics.sink import Sink

_LOGGER = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Reading:
    """The current value of a series."""

    series: Series
    value: float
    """A gauge's value, a counter's total so far, or how often a histogram has observed `at` so far."""
    tags: tuple[str, ...] = ()
    at: float = 0.0


class Publisher:
    """Reports to a sink what has changed since the last reading."""

    def __init__(self, sink: Sink, read: Callable[[], Iterable[Reading]]) -> None:
        self._sink = sink
        self._read = read
        self._told: dict[tuple[str, tuple[str, ...], float], float] = {}
        self._task: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """Read and report once. A counter that seems to have decreased was merely read too early and is skipped."""
        for reading in self._read():
            if reading.series.kind == "gauge":
                self._sink.set(reading.series, reading.value, *reading.tags)
                continue
            key = reading.series.name, reading.tags, reading.at
            new = reading.value - self._told.get(key, 0)
            if new <= 0:
                continue
            self._told[key] = reading.value
            if reading.series.kind == "counter":
                self._sink.add(reading.series, new, *reading.tags)
            else:
                for _ in range(int(new)):
                    self._sink.observe(reading.series, reading.at, *reading.tags)

    def start(self, seconds: float = 1.0) -> None:
        """Publish periodically in the running event loop; does nothing if already started."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        while True:
            try:
                self.publish()
            except Exception:  # monitoring must not break the replica
                _LOGGER.exception("metrics could not be published")
            await asyncio.sleep(seconds)
