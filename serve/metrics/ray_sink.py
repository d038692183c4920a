"""A sink that passes metrics to Ray, which exports them on every node for Prometheus."""

from typing import Any

from ray.serve import metrics

from serve.metrics.series import Series
from serve.metrics.sink import Sink


class RaySink(Sink):
    """Passes metrics to Ray. Creates each Ray metric on first use, inside the replica, so that it gets its tags."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def add(self, series: Series, value: float, *tags: str) -> None:
        self._metric(series).inc(value, self._named(series, tags))

    def set(self, series: Series, value: float, *tags: str) -> None:
        self._metric(series).set(value, self._named(series, tags))

    def observe(self, series: Series, value: float, *tags: str) -> None:
        self._metric(series).observe(value, self._named(series, tags))

    def _named(self, series: Series, tags: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(series.tags, tags, strict=True))

    def _metric(self, series: Series) -> Any:
        if series.name not in self._made:
            self._made[series.name] = _make(series)
        return self._made[series.name]


def _make(series: Series) -> Any:
    words = {"name": series.name, "description": series.meaning, "tag_keys": series.tags}
    if series.kind == "histogram":
        return metrics.Histogram(**words, boundaries=list(series.buckets))
    return (metrics.Counter if series.kind == "counter" else metrics.Gauge)(**words)
