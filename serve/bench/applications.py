"""Deploys and scales applications for the duration of a benchmark, and pins their processes to cores."""

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from moray.cluster.configs import RayConfig
from moray.errors import ConfigError
from serve.bench.configs import PoolConfig, WayConfig
from serve.config import read_args
from serve.deploy import DeployConfig, DeployError, deploy

_POLL_SECONDS = 0.2


class Applications:
    """The deployed applications, each under its own path."""

    def __init__(self, wait_seconds: float, host: str = "127.0.0.1") -> None:
        """Requires an open connection to Ray. `host` is the address to serve at."""
        self._wait_seconds = wait_seconds
        self._host = host
        with socket.socket() as probe:
            probe.bind((host, 0))
            self._port = probe.getsockname()[1]
        self._cores = _cores()

    def url(self, name: str) -> str:
        """The address of an application."""
        return f"http://{self._host}:{self._port}/{name}"

    def deploy(self, args: Mapping[str, dict[str, Any]], pool: PoolConfig) -> None:
        """Deploy applications by name; those that differ only in their numbers of replicas are scaled.

        Raises:
            DeployError: an application does not run in time.
        """
        applications = tuple(
            {
                "name": name,
                "route_prefix": f"/{name}",
                "import_path": "serve.app:build_app",
                "args": own,
                "deployments": _deployments(own, pool),
            }
            for name, own in args.items()
        )
        options = {"host": self._host, "port": self._port}
        seconds = self._wait_seconds
        deploy(DeployConfig(applications=applications, http_options=options, wait_seconds=seconds))
        self._wait(applications, time.monotonic() + seconds)

    def _wait(self, applications: Sequence[dict[str, Any]], deadline: float) -> None:
        """Wait until exactly the requested replicas run, which includes the end of removed ones."""
        from ray import serve

        while True:
            status = serve.status().applications
            missing = [
                f"{application['name']}: {wanted['name']}"
                for application in applications
                for wanted in application["deployments"]
                if status[application["name"]].deployments[wanted["name"]].replica_states
                != {"RUNNING": wanted["num_replicas"]}
            ]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise DeployError(f"{', '.join(missing)} has other replicas than asked for: give more wait_seconds")
            time.sleep(_POLL_SECONDS)

    def cpu_seconds(self) -> float:
        """Processor time so far of the proxy and of all replicas."""
        import psutil

        total = 0.0
        for process in psutil.Process().children(recursive=True):
            try:
                title = " ".join(process.cmdline())
                if "ServeReplica:" in title or "ProxyActor" in title:
                    times = process.cpu_times()
                    total += times.user + times.system
            except psutil.Error:
                continue  # the process has ended
        return total

    def pin(self, name: str, cores: Mapping[Any, Sequence[int]]) -> None:
        """Pin processes to cores: an application's replicas by deployment, this process and all others as "others"."""
        import psutil

        if not self._cores:
            return
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            try:
                part = _part(process.cmdline(), name)
                for thread in process.threads():  # existing threads do not inherit a new affinity
                    os.sched_setaffinity(thread.id, cores.get(part, self._cores))
            except (psutil.Error, ProcessLookupError):
                continue  # the process has ended

    def pin_apart(self, name: str, pid: int) -> None:
        """Pin an application's replicas to the first core and a process to the second one; everything else may use
        every core, these two included.

        Raises:
            ConfigError: there are no two cores that processes can be pinned to.
        """
        import psutil

        if len(self._cores) < 2:
            raise ConfigError(f"pin_cores is true, but {len(self._cores)} cores can be chosen here: set it to false")
        first, second, *_ = sorted(self._cores)
        self.pin(name, {part: [first] for part in ("Gateway", "Target", "Drafter")})
        for thread in psutil.Process(pid).threads():
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread.id, [second])


def check_cores(ways: Mapping[str, WayConfig]) -> None:
    """Check that this machine has all cores that the ways name.

    Raises:
        ConfigError: it does not.
    """
    there = _cores()
    for name, way in ways.items():
        for part, cores in way.cores.items():
            for core in cores:
                if core not in there:
                    known = ", ".join(map(str, sorted(there))) or "none that can be chosen"
                    raise ConfigError(f"ways.{name}.cores.{part} is {core}; the cores here are {known}")


def _cores() -> set[int]:
    """The cores that this process may use; empty on systems without CPU affinity."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def running(ray: RayConfig, wait_seconds: float, host: str = "127.0.0.1") -> Iterator[Applications]:
    """Run Ray and Serve for the duration of a benchmark.

    Args:
        ray: resources of the Ray that is started.
        wait_seconds: maximum time for replicas to start.
        host: address to serve at.

    Raises:
        ConfigError: an address names a cluster, or Serve runs already; the benchmark must not shut down either.
    """
    from moray.cluster.own_serve import check_own_ray, own_serve
    from moray.cluster.session import ray_session

    check_own_ray(ray)
    with ray_session(ray), own_serve():
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield Applications(wait_seconds, host)


def _deployments(args: Mapping[str, Any], pool: PoolConfig) -> list[dict[str, Any]]:
    counts = {"Gateway": 1, "Target": pool.targets}
    if read_args(args).pooled:
        counts["Drafter"] = pool.drafters
    return [
        {"name": name, "num_replicas": count, "ray_actor_options": {"num_cpus": 0}} for name, count in counts.items()
    ]


def _part(words: Sequence[str], application: str) -> str:
    """The deployment that a process is a replica of, else "others"."""
    title = " ".join(words)
    for deployment in ("Gateway", "Target", "Drafter"):
        if f"ServeReplica:{application}:{deployment}" in title:
            return deployment
    return "others"
