"""Connecting to Ray: one place that knows addresses, environment variables and what workers import."""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moray.cluster import ENVIRONMENT
from moray.cluster.configs import RayConfig
from moray.cluster.reach import check_cluster, check_temporary_folder
from moray.config import read_yaml
from moray.errors import ClusterError
from moray.explain import one_line
from moray.progress import Progress
from moray.runs_folder import JOB_VARIABLE

_RUNTIME_ENV_FILE = "configs/runtime_env.yaml"
_CPP_LOG_LEVEL = "RAY_BACKEND_LOG_LEVEL"
_DATA_CPUS = 4


@contextmanager
def ray_session(config: RayConfig) -> Iterator[None]:
    """A connection to Ray for the length of a pipeline; joins a session that is already open.

    Open it before the first import of ray: a new cluster then listens on the loopback interface alone.

    Raises:
        ConfigError: the address is malformed, or Ray cannot work in its temporary folder.
        ClusterError: no cluster answers at the address, or Ray does not start.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address == "local":  # Ray's own word for a new cluster
        address = None
    if not address or address.startswith(("127.0.0.1:", "localhost:")):
        # Ray's word for "this cluster has one machine"; without it, it listens on all interfaces, and looks for a
        # cluster that listens on loopback alone at the machine's outer address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    _quieten()
    try:
        with _sigterm_kept():
            if address:
                _join(address, "ray.address" if config.address else "RAY_ADDRESS")
            else:
                _start(config)
        yield
    finally:
        ray.shutdown()


def _join(address: str, name: str) -> None:
    import ray
    import ray.exceptions

    with Progress(f"connect to Ray at {address}"), _stderr_held():
        check_cluster(address, name)
        try:
            ray.init(address=address, runtime_env=runtime_env(), log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"{name} is '{address}', but connecting to its cluster failed: {one_line(str(error))}"
            ) from None


def _start(config: RayConfig) -> None:
    import ray

    check_temporary_folder()
    # One machine is never announced to be taken away: spare the process that would watch for it.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    with Progress("start Ray"), _stderr_held():
        try:
            ray.init(
                address="local",
                num_cpus=config.num_cpus or (os.cpu_count() or 1) + _DATA_CPUS,
                include_dashboard=config.dashboard,
                dashboard_host="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # noqa: BLE001 - what Ray raises where its processes take too long to start
            raise ClusterError(f"Ray does not start on this machine: {one_line(str(error))}") from None


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the entry point's answer to SIGTERM, which Ray replaces by its own as it starts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def runtime_env() -> dict[str, Any]:
    """What workers of a cluster import and are set to. A submitted job has brought its code already."""
    variables = {name: value for name, value in ENVIRONMENT.items() if name != "RAY_AUTH_MODE"}
    job = os.environ.get(JOB_VARIABLE)
    if job:
        # Ray refuses a variable that is given twice; the job's own value is the one that was asked for.
        given = (json.loads(job).get("runtime_env") or {}).get("env_vars") or {}
        return {"env_vars": {name: value for name, value in variables.items() if name not in given}}
    root = Path(__file__).resolve().parents[3]
    if not (root / _RUNTIME_ENV_FILE).is_file():
        return {"env_vars": variables}  # installed from a wheel, as on the nodes
    shipped = read_yaml(root / _RUNTIME_ENV_FILE)
    return {**shipped, "working_dir": str(root), "env_vars": variables | shipped["env_vars"]}


@contextmanager
def _stderr_held() -> Iterator[None]:
    """Hold back stderr while Ray starts, to drop the one line in which its C++ reports the level we set."""
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if _CPP_LOG_LEVEL.encode() not in line:
                    os.write(2, line)


def _quieten() -> None:
    """Leave the console to progress and errors; Ray's log files keep everything."""
    # Ray Data sets up its actors so that Ray's C++ calls them a danger, on every run. `putenv` reaches the C++
    # of this process alone: what Ray starts gets `os.environ`, and logs as ever.
    if _CPP_LOG_LEVEL not in os.environ:
        os.putenv(_CPP_LOG_LEVEL, "fatal")
    import ray.data

    # What fails comes as an exception: its log lines would say it a second time, across the progress bar.
    for name in ("ray", "ray.data", "ray.train", "ray.tune"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Batches must come in plan order, or a resumed run would not repeat an unbroken one.
    context.execution_options.preserve_order = True
