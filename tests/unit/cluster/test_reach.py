"""Addresses of clusters that are not there, and folders in which Ray cannot work: one line each. No Ray runs."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest

from moray.cluster.configs import RayConfig
from moray.cluster.reach import check_cluster, check_temporary_folder
from moray.cluster.session import ray_session
from moray.errors import ClusterError, ConfigError

pytestmark = pytest.mark.usefixtures("no_token")


@pytest.fixture
def no_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture
def no_session(monkeypatch):
    """A process of the tests may have a Ray of its own, which a pipeline would join, and which no failure may end."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """Takes connections, as the system does for it, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def refusal(address: str, error: type[Exception], seconds: float = 30.0) -> str:
    with pytest.raises(error) as caught:
        check_cluster(address, "RAY_ADDRESS", seconds)
    text = str(caught.value)
    assert text.startswith(f"RAY_ADDRESS is '{address}'")
    assert "\n" not in text
    return text


def test_a_port_where_nobody_listens_is_given_up_at_once(listening):
    port = listening.getsockname()[1]
    listening.close()
    text = refusal(f"127.0.0.1:{port}", ClusterError)
    assert "(Connection refused): start one with `ray start --head`" in text


def test_a_port_that_says_nothing_is_given_up_in_time(listening):
    text = refusal(f"127.0.0.1:{listening.getsockname()[1]}", ClusterError, seconds=0.5)
    assert "(no answer within 0.5 s)" in text


def test_a_web_server_is_no_cluster():
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "not a Ray cluster" in refusal(f"127.0.0.1:{server.server_port}", ClusterError)
    finally:
        server.shutdown()
        server.server_close()


def test_another_grpc_server_is_no_cluster():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert "not a Ray cluster" in refusal(f"127.0.0.1:{port}", ClusterError)
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:8265", "the dashboard's address"),
        ("ray://127.0.0.1:10001", "do not run through Ray's client"),
        ("127.0.0.1", "no address of a Ray cluster"),
        ("head 6379", "no address of a Ray cluster"),
    ],
)
def test_what_is_no_address_of_a_cluster_is_the_users_to_mend(address, said):
    text = refusal(address, ConfigError)
    assert said in text
    assert "give HOST:PORT" in text


@pytest.mark.parametrize("given", ["ray.address", "RAY_ADDRESS"])
def test_every_session_names_where_its_address_comes_from(given, listening, no_session, monkeypatch):
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    monkeypatch.setenv("RAY_ADDRESS", address if given == "RAY_ADDRESS" else "127.0.0.1:2")
    config = RayConfig(address=address if given == "ray.address" else None)
    with pytest.raises(ClusterError, match=f"^{given} is '{address}'"), ray_session(config):
        pass


def test_a_folder_too_long_for_sockets_is_refused_before_ray_starts(no_session, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + 60 * "x")
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR is '/tmp/x+', .* at most \d\d bytes$"), ray_session(RayConfig()):
        pass


def test_the_longest_folder_that_is_advised_is_accepted(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + 60 * "x")
    with pytest.raises(ConfigError) as caught:
        check_temporary_folder()
    longest = int(str(caught.value).split()[-2])
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: None)
    monkeypatch.setattr("os.access", lambda *_: True)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + (longest - 5) * "x")
    check_temporary_folder()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + (longest - 4) * "x")
    with pytest.raises(ConfigError, match="would be 1 bytes longer"):
        check_temporary_folder()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    monkeypatch.setattr("moray.cluster.reach._SOCKET_BYTES", 1_000)
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR is .*where Ray cannot write \(.*set RAY_TMPDIR to a folder"):
        check_temporary_folder()
