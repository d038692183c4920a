"""Statistical spread of figures: quartiles and bootstrap intervals over prompts.

This module does not depend on what the figures mean.
"""

import random
import statistics
from collections.abc import Callable, Sequence

_NUM_RESAMPLES = 400


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """95 % interval of sum(a) / sum(b) over pairs (a, b), by bootstrap over the pairs; None if b is always 0."""
    return _interval(len(pairs), lambda chosen: _ratio([pairs[i] for i in chosen]))


def ratio_of_ratios_interval(
    above: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    """95 % interval of the quotient of two such ratios, by paired bootstrap: the same indices are drawn from both."""

    def quotient(chosen: Sequence[int]) -> float | None:
        top, bottom = _ratio([above[i] for i in chosen]), _ratio([below[i] for i in chosen])
        return None if top is None or not bottom else top / bottom

    return _interval(len(above), quotient)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 25 %, 50 % and 75 % points of one value or more."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    below = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) / below if below else None


def _interval(count: int, figure: Callable[[Sequence[int]], float | None]) -> tuple[float, float] | None:
    """The middle 95 % of a figure over resampled prompts, ignoring resamples in which it is undefined."""
    rng = random.Random(0)  # fixed seed, so that the same answers give the same report
    drawn = (figure(rng.choices(range(count), k=count)) for _ in range(_NUM_RESAMPLES if count else 0))
    values = sorted(value for value in drawn if value is not None)
    if not values:
        return None
    return values[int(0.025 * len(values))], values[int(0.975 * len(values))]
