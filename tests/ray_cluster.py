"""A Ray cluster of this machine with token authentication, as `ray start` makes it, and what its users type."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
_SCRIPTS = Path(sys.executable).parent


def free_port() -> int:
    """A port of the loopback interface at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RayCluster:
    """One head, until `close`; commands run in the root of the repository."""

    def __init__(self, runs: Path, num_cpus: int = 12) -> None:
        """
        Args:
            runs: what runs/... stands for.
            num_cpus: logical ones.
        """
        self.runs = runs
        self._folder = Path(tempfile.mkdtemp(prefix="moray-"))  # short: Ray's sockets lie below it
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        port, dashboard_port = free_port(), free_port()
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"
        self.environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
            "PATH": f"{_SCRIPTS}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or it would listen on all interfaces
        }
        self.user = self.environment | {
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_DASHBOARD_ADDRESS": self.dashboard,
            "RAY_ADDRESS": f"127.0.0.1:{port}",
        }
        with (self._folder / "log").open("w") as log:
            self._process = psutil.Popen(
                ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
                 "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}",
                 f"--dashboard-agent-listen-port={free_port()}",  # another Ray of this machine has the usual one
                 f"--num-cpus={num_cpus}",
                 f"--object-store-memory={200 * 2**20}", f"--temp-dir={self._folder / 'ray'}"],
                env=self.environment | {"MORAY_RUNS": str(runs)}, cwd=self._folder, stdout=log, stderr=log,
            )  # fmt: skip
        self._wait_until_started()

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in (text := (self._folder / "log").read_text()):
            assert self._process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)

    def run(self, *words: str, timeout: float = 240, **changes: str) -> subprocess.CompletedProcess[str]:
        """A command of a user who has the token."""
        return subprocess.run(
            words, cwd=REPOSITORY, env=self.user | changes, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, *words: str) -> psutil.Popen:
        """The same, left running; the caller ends it."""
        log = (self._folder / "started").open("w")
        return psutil.Popen(words, cwd=REPOSITORY, env=self.user, stdout=log, stderr=log)

    def submit(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """A job of the shipped runtime environment, until it ends."""
        command = ("ray", "job", "submit", "--runtime-env", "configs/runtime_env.yaml", "--", *words)
        deadline = time.monotonic() + 60
        while "No available agent to submit job" in (job := self.run(*command, **changes)).stderr:
            assert time.monotonic() < deadline, job.stderr
            time.sleep(1)  # a head takes jobs only some time after it has started
        return job

    def get(self, path: str, token: str | None = None) -> Any:
        """Of the dashboard, without the token unless it is given."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return urllib.request.urlopen(urllib.request.Request(self.dashboard + path, headers=headers), timeout=20)

    def close(self) -> None:
        """End it, and whatever of it stays behind."""
        started = [self._process, *self._process.children(recursive=True)]
        self._process.terminate()
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
