"""The followers of a tensor-parallel target: one process each on this machine, which end with the leader."""

import json
import os
import subprocess
import sys
from pathlib import Path

from moray.errors import ConfigError, RankError
from moray.targets.spec import TargetConfig

_END_SECONDS = 5.0
"""A follower that has not ended this long after its leader let go of it is killed."""


class Followers:
    """The processes of all ranks but the first."""

    def __init__(self, config: TargetConfig, folder: Path, threads: int) -> None:
        """Start them; they begin to load their parts."""
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "moray.targets.parallel.follower"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for _ in range(1, config.tensor_parallel)
        ]
        for rank, process in enumerate(self._processes, start=1):
            settings = {"target": config.model_dump(), "rank": rank, "folder": str(folder), "threads": threads}
            assert process.stdin is not None
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Wait until every follower has loaded its part.

        Raises:
            ConfigError: one of them could not.
        """
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            said = process.stdout.readline().strip()
            if said != "ready":
                process.kill()
                code = process.wait()
                reason = said or f"it ended with exit code {code} (its error is above)"
                raise ConfigError(f"target.tensor_parallel: rank {rank} could not load its part: {reason}")

    def check(self) -> None:
        """Raise `RankError` if a follower has ended."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is not None:
                raise RankError(
                    f"target.tensor_parallel: rank {rank} of {len(self._processes) + 1} has ended with exit code "
                    f"{code}: load the target again"
                )

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """Kill all, without waiting."""
        for process in self._processes:
            process.kill()

    def wait(self) -> None:
        """Wait until all have ended."""
        for process in self._processes:
            process.wait()

    def end(self) -> None:
        """Let them end; kill those that do not."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
