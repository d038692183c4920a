"""Counts attempts per piece of work on disk, so that a piece that keeps killing workers is reported after four of them.

Ray Data replaces an actor that died and gives the same task to the new one, indefinitely and without naming the task.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from moray.activations.format.store import CacheStore
from moray.errors import DamagedError, RankError

MAX_ATTEMPTS = 4
"""Attempts at one piece before it is reported: preempted machines may hit the same piece twice, hardly ever four
times."""
ATTEMPTS = ".attempts"
"""Suffix of the files that hold a count; a starting run deletes them."""
ATTEMPTS_FOLDER = "attempts"
"""Folder for the counts of windows, which are recomputed each time; the counts of shards are in the shards' folder."""


class Attempts:
    """Attempt counts, kept in files beside the work because they must survive the worker's death."""

    def __init__(self, store: CacheStore, folder: str = "") -> None:
        self._store = store
        self._prefix = f"{folder}/" if folder else ""

    def begin(self, name: str) -> bool:
        """Count one more attempt; return False if there were `MAX_ATTEMPTS` already."""
        file = self._file(name)
        try:
            attempts = int(self._store.read_json(file)["attempts"])
        except DamagedError:  # no count yet, or another starting run has just deleted it
            attempts = 0
        if attempts >= MAX_ATTEMPTS:
            return False
        self._store.write_json(file, {"attempts": attempts + 1})
        return True

    def end(self, name: str) -> None:
        """Delete the count of a piece that is done or that failed with its own error."""
        self._store.delete(self._file(name))

    @contextmanager
    def clearing(self, name: str) -> Iterator[None]:
        """Delete the count after the block, except if a rank was lost, because then the replica ends."""
        try:
            yield
        except RankError:
            raise
        except BaseException:
            self.end(name)
            raise
        self.end(name)

    def _file(self, name: str) -> str:
        return f"{self._prefix}{name}{ATTEMPTS}"
