"""A sink of metrics for tests."""

from collections import defaultdict

from serve.metrics.series import Series
from serve.metrics.sink import Sink


class RememberingSink(Sink):
    """Remembers everything that is published, by name and tags."""

    def __init__(self) -> None:
        self.sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.now: dict[str, float] = {}
        self.seen: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, series: Series, value: float, *tags: str) -> None:
        assert series.kind == "counter"
        assert value > 0
        assert len(tags) == len(series.tags)
        self.sums[series.name, *tags] += value

    def set(self, series: Series, value: float, *tags: str) -> None:
        assert series.kind == "gauge"
        self.now[series.name] = value

    def observe(self, series: Series, value: float, *tags: str) -> None:
        assert series.kind == "histogram"
        self.seen[series.name].append(value)

    def total(self, series: Series) -> float:
        """Of a counter, over all tags."""
        return sum(value for (name, *_), value in self.sums.items() if name == series.name)
