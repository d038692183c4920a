"""Series of figures for a plot: some of the figures are missing, and some series are too long to draw.

This module does not depend on what the figures mean or on how a plot draws them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from moray.bench.reports.schema import Measure

_MAX_POINTS = 300  # of a curve


class Point(NamedTuple):
    """A point of a curve."""

    x: float
    y: float


def has_figures(values: Sequence[Measure]) -> bool:
    """Check whether a series has any figure at all."""
    return any(value is not None for value in values)


def with_nan(values: Sequence[Measure]) -> list[float]:
    """Put NaN where a figure is missing: matplotlib leaves a gap there."""
    return [float("nan") if value is None else value for value in values]


def last_figure(values: Sequence[Measure]) -> float:
    """Return the last figure of a series that has at least one."""
    return next(value for value in reversed(values) if value is not None)


def bucket_size(num_values: int) -> int:
    """Return how many values of a series to average into one point: 1 for a series that is short enough."""
    return math.ceil(num_values / _MAX_POINTS)


def average_in_buckets(xs: Sequence[Measure], ys: Sequence[Measure]) -> list[Point]:
    """Make at most `_MAX_POINTS` points of two series: the means of neighbours, where both figures are there."""
    size = bucket_size(len(xs))
    means: list[Point] = []
    for start in range(0, len(xs), size):
        bucket = _known_points(xs[start : start + size], ys[start : start + size])
        if bucket:
            mean_x = sum(point.x for point in bucket) / len(bucket)
            mean_y = sum(point.y for point in bucket) / len(bucket)
            means.append(Point(mean_x, mean_y))
    return means


def _known_points(xs: Sequence[Measure], ys: Sequence[Measure]) -> list[Point]:
    """Pair the two series up, and leave out every pair of which a figure is missing."""
    return [Point(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
