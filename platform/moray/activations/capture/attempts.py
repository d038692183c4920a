"""Counts attempts per piece of work on disk, so that a piece that keeps killing workers is reported after four of them.

Ray Data replaces an actor that died and hands the same task to the new one, without end and without saying which task
it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from moray.activations.format.store import CacheStore
from moray.errors import DamagedError, RankError

MAX_ATTEMPTS = 4
"""Attempts at one piece before it is reported: a machine that is taken away may hit the same piece twice, hardly ever
four times."""
ATTEMPTS = ".attempts"
"""End of the names of the files that hold a count; the start of a run removes them."""
ATTEMPTS_FOLDER = "attempts"
"""Of a cache's windows that are made anew each time; the counts of its shards lie among the shards."""


class Attempts:
    """Counts in files beside the work: they must survive the death of the worker."""

    def __init__(self, store: CacheStore, folder: str = "") -> None:
        self._store = store
        self._prefix = f"{folder}/" if folder else ""

    def begin(self, name: str) -> bool:
        """Count one more attempt; False if there were `MAX_ATTEMPTS` already."""
        file = self._file(name)
        try:
            attempts = int(self._store.read_json(file)["attempts"])
        except DamagedError:  # there is none, or another run that begins has just removed it
            attempts = 0
        if attempts >= MAX_ATTEMPTS:
            return False
        self._store.write_json(file, {"attempts": attempts + 1})
        return True

    def end(self, name: str) -> None:
        """Remove the count of a piece that is done, or that failed with an error of its own."""
        self._store.delete(self._file(name))

    @contextmanager
    def clearing(self, name: str) -> Iterator[None]:
        """Remove the count after the block. If a rank was lost it stays, for the replica ends."""
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
