"""Many small files at once: what waits for a store does not wait in turn."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 32
"""Markers are small, and there may be tens of thousands."""

_Result = TypeVar("_Result")


def in_threads(work: Callable[[str], _Result], names: Iterable[str], num_threads: int = NUM_THREADS) -> list[_Result]:
    """Results in the order of the names; for work that waits for a store."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, names))
