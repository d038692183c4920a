"""Runs work on many small files in parallel, to overlap the waits for a store."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 32
"""Default number of threads: markers are small, and there may be tens of thousands."""

_Result = TypeVar("_Result")


def in_threads(work: Callable[[str], _Result], names: Iterable[str], num_threads: int = NUM_THREADS) -> list[_Result]:
    """Apply `work`, which waits for a store, to all names in parallel; return the results in the order of the names."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, names))
