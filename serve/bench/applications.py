"""Applications for as long as a benchmark runs: deployed, scaled, and their processes found and put on cores."""

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from moray.errors import ConfigError
from serve.bench.configs import LoadConfig, PoolConfig, WayConfig
from serve.config import read_args
from serve.deploy import DeployConfig, DeployError, deploy

_POLL_SECONDS = 0.2


class Applications:
    """What is deployed, each application under a path of its own."""

    def __init__(self, config: LoadConfig) -> None:
        """Needs an open connection to Ray."""
        self._config = config
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._cores = _cores()

    def url(self, name: str) -> str:
        """Where an application answers."""
        return f"http://127.0.0.1:{self._port}/{name}"

    def deploy(self, args: Mapping[str, dict[str, Any]], pool: PoolConfig) -> None:
        """Deploy applications by name, or scale those that are the same but for their numbers of replicas.

        Raises:
            DeployError: they do not run in time.
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
        options = {"host": "127.0.0.1", "port": self._port}
        seconds = self._config.wait_seconds
        deploy(DeployConfig(applications=applications, http_options=options, wait_seconds=seconds))
        self._wait(applications, time.monotonic() + seconds)

    def _wait(self, applications: Sequence[dict[str, Any]], deadline: float) -> None:
        """Until there are as many replicas as were asked for, and no more: those taken away have to end."""
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

    def pin(self, name: str, cores: Mapping[Any, Sequence[int]]) -> None:
        """Let processes run on some cores alone: by deployment of an application, and all others that began here."""
        import psutil

        if not self._cores:
            return
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            try:
                part = _part(process.cmdline(), name)
                for thread in process.threads():  # a thread keeps what it had when its process gets another
                    os.sched_setaffinity(thread.id, cores.get(part, self._cores))
            except (psutil.Error, ProcessLookupError):
                continue  # it has ended meanwhile


def check_cores(ways: Mapping[str, WayConfig]) -> None:
    """
    Raises:
        ConfigError: this machine has not all the cores that are named.
    """
    there = _cores()
    for name, way in ways.items():
        for part, cores in way.cores.items():
            for core in cores:
                if core not in there:
                    known = ", ".join(map(str, sorted(there))) or "none that can be chosen"
                    raise ConfigError(f"ways.{name}.cores.{part} is {core}; the cores here are {known}")


def _cores() -> set[int]:
    """Those that this process may use; empty on systems that do not let it choose."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def running(config: LoadConfig) -> Iterator[Applications]:
    """Ray and Serve for the length of a benchmark.

    Raises:
        ConfigError: an address names a cluster, or Serve runs already: neither is the benchmark's to end.
    """
    from moray.cluster.own_serve import check_own_ray, own_serve
    from moray.cluster.session import ray_session

    check_own_ray(config.ray)
    with ray_session(config.ray), own_serve():
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield Applications(config)


def _deployments(args: Mapping[str, Any], pool: PoolConfig) -> list[dict[str, Any]]:
    counts = {"Gateway": 1, "Target": pool.targets}
    if read_args(args).pooled:
        counts["Drafter"] = pool.drafters
    return [
        {"name": name, "num_replicas": count, "ray_actor_options": {"num_cpus": 0}} for name, count in counts.items()
    ]


def _part(words: Sequence[str], application: str) -> str:
    """The deployment whose replica a process is."""
    title = " ".join(words)
    for deployment in ("Gateway", "Target", "Drafter"):
        if f"ServeReplica:{application}:{deployment}" in title:
            return deployment
    return "others"
