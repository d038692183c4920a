"""Whether Ray can be reached or started, found out before Ray tries: it would wait for a dead cluster for ever, in C++
where nothing interrupts it, and meet what is wrong on this machine with a traceback."""

import os
import re
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from moray.errors import ClusterError, ConfigError
from moray.explain import one_line

CONNECT_SECONDS = 30.0
"""After so long a cluster that says nothing is given up."""
_SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
"""Of a path of a Unix socket: the system's limit."""
_WHAT_TO_DO = "start one with `ray start --head` or name another; without an address most commands start their own"


def check_cluster(address: str, name: str, seconds: float = CONNECT_SECONDS) -> None:
    """Make sure that a cluster answers at an address, which Ray itself would wait for without end.

    Args:
        address: HOST:PORT, or "auto" for the one that runs on this machine.
        name: of the setting that it comes from.
        seconds: how long to wait for an answer.

    Raises:
        ConfigError: it is no address of a cluster.
        ClusterError: nothing answers in time, what answers is not Ray, or the cluster refuses our token.
    """
    _check_form(address, name)
    where = f"{name} is '{address}'"
    if address == "auto":
        address = _running_here(where)
        where += f", which is {address}"
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, UnicodeError) as error:  # the latter of a name that is no host's
        reason = (
            f"no answer within {seconds:g} s"
            if isinstance(error, TimeoutError)
            else getattr(error, "strerror", None) or error
        )
        raise ClusterError(f"{where}, where no Ray cluster answers ({reason}): {_WHAT_TO_DO}") from None
    _ask(address, where, seconds, max(0.1, deadline - time.monotonic()))


def _check_form(address: str, name: str) -> None:
    """
    Raises:
        ConfigError: an address of something else.
    """
    scheme = address.partition("://")[0] if "://" in address else ""
    accepted = "give HOST:PORT as `ray start --head` prints it (its port is 6379 unless told otherwise)"
    if scheme in ("http", "https"):
        raise ConfigError(
            f"{name} is '{address}', the dashboard's address, which takes jobs alone: {accepted}, or unset it and run "
            f"`ray job submit --address {address} --runtime-env configs/runtime_env.yaml -- python -m ...`"
        )
    if scheme:
        raise ConfigError(
            f"{name} is '{address}', but Moray's commands do not run through Ray's client: {accepted} on a machine of "
            "the cluster, or submit the command with `ray job submit`"
        )
    if address != "auto" and not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^:\s/]+):\d{1,5}", address):
        raise ConfigError(f"{name} is '{address}', which is no address of a Ray cluster: {accepted}")
    if address != "auto" and not 0 < int(address.rpartition(":")[2]) < 1 << 16:
        raise ConfigError(f"{name} is '{address}', whose port is not between 1 and 65535: {accepted}")


def _running_here(where: str) -> str:
    """HOST:PORT of the cluster that was started on this machine.

    Raises:
        ClusterError: there is none.
    """
    from ray._private import services  # what `ray.init` asks; nothing public tells

    try:
        found = services.canonicalize_bootstrap_address("auto")
    except ConnectionError as error:
        raise ClusterError(f"{where}, but {one_line(str(error))}") from None
    if found is None:
        raise ClusterError(f"{where}, but no Ray cluster runs on this machine: {_WHAT_TO_DO}")
    return found


def _ask(address: str, where: str, seconds: float, left: float) -> None:
    """Send the health check that every Ray cluster answers. It runs in Python because Ray's own client blocks in C++.

    Raises:
        ClusterError: the listener is not Ray, does not answer in time, or refuses our token.
    """
    import grpc
    import ray.exceptions
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    messages: Any = gcs_service_pb2
    channel = init_grpc_channel(address, [("grpc.enable_http_proxy", 0)])  # nor does Ray use one
    try:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        stub.CheckAlive(messages.CheckAliveRequest(), timeout=left)
    except ray.exceptions.AuthenticationError:
        raise ClusterError(
            f"{where}, and RAY_AUTH_MODE is 'token', but there is no token on this side: give the cluster's in "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, or RAY_AUTH_MODE=disabled if it asks for none"
        ) from None
    except grpc.RpcError as error:
        code = error.code()
        if code == grpc.StatusCode.UNAUTHENTICATED:
            raise ClusterError(
                f"{where}, whose cluster refuses our token: set RAY_AUTH_MODE and the token (RAY_AUTH_TOKEN, "
                "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token) as it was started with"
            ) from None
        reason = f"no answer within {seconds:g} s" if code == grpc.StatusCode.DEADLINE_EXCEEDED else "no Ray cluster"
        raise ClusterError(
            f"{where}, where something listens that is not a Ray cluster that is alive ({reason}): {_WHAT_TO_DO}"
        ) from None
    finally:
        channel.close()


def check_temporary_folder() -> None:
    """Make sure that Ray can put its sessions where it is going to.

    Raises:
        ConfigError: its sockets' paths would be too long there, or nothing can be written.
    """
    from ray._common.utils import get_default_ray_temp_dir

    folder = Path(get_default_ray_temp_dir())
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform.startswith("linux") else ("RAY_TMPDIR",)  # as Ray reads them
    name = next((name for name in names if name in os.environ), None)
    where = f"{name} is '{os.environ[name]}'" if name else f"Ray's folder is '{folder}'"
    session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    excess = len(os.fsencode(folder / session / "sockets" / "plasma_store")) - _SOCKET_BYTES
    if excess > 0:
        longest = len(os.fsencode(folder.parent)) - excess
        raise ConfigError(
            f"{where}, in which the paths of Ray's sockets would be {excess} bytes longer than the {_SOCKET_BYTES} "
            f"that the system takes: set RAY_TMPDIR to a folder whose path has at most {longest} bytes"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{where}, where Ray cannot write ({error.strerror}): set RAY_TMPDIR to a folder that you may write"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}, but '{folder}' cannot be written: set RAY_TMPDIR to a folder that you may write")
