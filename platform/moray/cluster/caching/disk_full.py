"""Handles a disk that fills up during caching: ends everything, deletes half-written files and tells the user why."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moray.activations.format.disk_space import size_text
from moray.activations.format.store import CacheStore
from moray.activations.planning.measure import written_bytes
from moray.cluster.errors import let_go
from moray.errors import StorageFullError

_PATIENCE_SECONDS = 20.0


@dataclass
class Goal:
    """Expected total bytes of the cache; None until known."""

    total: int | None = None


@contextmanager
def cache_full_errors(store: CacheStore) -> Iterator[Goal]:
    """If the disk is full, delete half-written files and report how much is written and how much is missing.

    Raises:
        StorageFullError: in place of one raised in the block by this process or any of its actors.
    """
    goal = Goal()
    try:
        yield goal
    except StorageFullError as error:
        let_go(error)
        _clear(store)
        written = written_bytes(store)
        if goal.total is None:
            missing = "how much is missing is known once all chats are tokenised"
        else:
            missing = f"about {size_text(max(0, goal.total - written))} are missing"
        raise StorageFullError(
            f"{error}; {size_text(written)} of the cache are written and safe, {missing}: make room, then run the "
            "same command again to resume"
        ) from None


def _clear(store: CacheStore) -> None:
    """Delete half-written files until no new ones appear: other actors are about to end, but may write until then."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    quiet = 0
    while quiet < 3 and time.monotonic() < deadline:
        quiet = 0 if store.clear_temporary() else quiet + 1
        time.sleep(0.3)
