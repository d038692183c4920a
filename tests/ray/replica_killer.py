"""Kills replicas with kill -9 over one piece of work, again and again."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path


class ReplicaKiller:
    """While the block runs, the replica that works on a piece is killed each time the piece is begun."""

    def __init__(
        self, attempts: Path, count: int, replicas: Callable[[], dict[int, str]], kill: Callable[[int], None]
    ) -> None:
        """
        Args:
            attempts: the file in which the product counts attempts at the piece, or a pattern for its name.
            count: how often to kill.
            replicas: their processes now, by id.
            kill: what kills one.
        """
        self._thread = threading.Thread(target=self._run, args=(attempts, count, replicas, kill))
        self._done = threading.Event()
        self.killed: list[int] = []

    def __enter__(self) -> "ReplicaKiller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(
        self, attempts: Path, count: int, replicas: Callable[[], dict[int, str]], kill: Callable[[int], None]
    ) -> None:
        while len(self.killed) < count and not self._done.is_set():
            if _begun(attempts) > len(self.killed):
                for replica in replicas().keys() - set(self.killed):
                    kill(replica)
                    self.killed.append(replica)
            time.sleep(0.005)


def _begun(attempts: Path) -> int:
    for path in attempts.parent.glob(attempts.name):
        try:
            return json.loads(path.read_text())["attempts"]
        except FileNotFoundError:
            continue
    return 0
