"""How often a piece of work has been begun: what workers die over again and again is named and not tried for ever.

Ray Data puts another actor in a dead one's place and hands it the same task, without end, and tells nobody which.
"""

from moray.activations.format.store import CacheStore
from moray.errors import DamagedError

MAX_TRIES = 4
"""Of one piece, before the deaths over it are thought to be its own doing: machines that are taken away hit the same
piece twice now and then, four times hardly ever."""
TRIES = ".tries"
"""How the names of the files end that hold a count; whoever begins a run removes them."""
TRIES_FOLDER = "tries"
"""Of a cache's windows that are made anew each time; the counts of its shards lie among the shards."""


class Tries:
    """Counts in files beside the work, for they must outlive who does it."""

    def __init__(self, store: CacheStore, folder: str = "") -> None:
        self._store = store
        self._prefix = f"{folder}/" if folder else ""

    def begin(self, name: str) -> bool:
        """Note that a piece is begun; False if `MAX_TRIES` were in vain already."""
        file = self._file(name)
        try:
            tries = int(self._store.read_json(file)["tries"])
        except DamagedError:  # there is none, or another run that begins has just removed it
            tries = 0
        if tries >= MAX_TRIES:
            return False
        self._store.write_json(file, {"tries": tries + 1})
        return True

    def end(self, name: str) -> None:
        """Forget a piece: it is there, or failed in a way that speaks for itself."""
        self._store.delete(self._file(name))

    def _file(self, name: str) -> str:
        return f"{self._prefix}{name}{TRIES}"
