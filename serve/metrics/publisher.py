"""From what a replica has counted to a sink, once a second.

Whoever counts does so in plain numbers that only grow, in its own thread; they are read here, from another one. A
reading may be a moment old, or between two numbers that belong together: what is missing comes with the next one.
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
    """What something stands at."""

    series: Series
    value: float
    """Of a gauge; of a counter, all so far; of a histogram, how often `at` was seen so far."""
    tags: tuple[str, ...] = ()
    at: float = 0.0


class Publisher:
    """Tells a sink what has been added since the last time."""

    def __init__(self, sink: Sink, read: Callable[[], Iterable[Reading]]) -> None:
        self._sink = sink
        self._read = read
        self._told: dict[tuple[str, tuple[str, ...], float], float] = {}
        self._task: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """Read, and tell. A counter that seems to have gone back has only been read too early: it is let be."""
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
        """Publish every so many seconds from now on, in the event loop that runs; started already, it goes on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        while True:
            try:
                self.publish()
            except Exception:  # whoever watches must not harm who is watched
                _LOGGER.exception("metrics could not be published")
            await asyncio.sleep(seconds)
