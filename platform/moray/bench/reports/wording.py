"""Formats figures for people, identically in the terminal and on the page.

This module does not depend on which figures there are.
"""

from collections.abc import Sequence
from datetime import timedelta

from moray.bench.reports.schema import Measure


def number(value: Measure, digits: int = 3) -> str:
    """Format with `digits` significant digits, larger values as integers, with no exponent below 1e9; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 10 ** (digits - 1):
        text = f"{value:#.{digits}g}" if value else "0"
        return text.rstrip(".")
    return f"{value:,.0f}" if 1 <= abs(value) < 1e9 else f"{value:.{digits}g}"


def times(value: Measure) -> str:
    """Format a factor."""
    return "-" if value is None else f"{number(value)}x"


def percent(value: Measure) -> str:
    """Format a share as a percentage."""
    return "-" if value is None else f"{100 * value:.0f} %"


def count(value: int | None) -> str:
    """Format a whole number."""
    return "-" if value is None else f"{value:,}"


def temperature(value: Measure) -> str:
    """Format a temperature as it was set."""
    return "-" if value is None else f"{value:g}"


def duration(seconds: Measure) -> str:
    """Format as hours, minutes and seconds."""
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))


def interval(bounds: Sequence[Measure] | None) -> str:
    """Format the low and high end of an interval."""
    return "-" if bounds is None else " to ".join(number(bound) for bound in bounds)


def pair(speedup: Measure, tau: Measure) -> str:
    """Format speed-up and tau in one cell."""
    return "-" if speedup is None and tau is None else f"{number(speedup)} / {number(tau)}"
