"""Emulated networks: mean, deviation, rate and loss are those of the profile; TCP runs over a real one."""

import socket
import statistics
import subprocess
import sys
import threading
import time

import pytest

from moray.edge.link.emulator import Direction
from moray.edge.link.namespaces import emulated_link, why_not
from moray.edge.link.profiles import PROFILES, LinkProfile

FAST = {"name": "test", "rate_mbit": 1000.0}


def delays_of(profile: LinkProfile, count: int, gap: float, size: int = 100) -> tuple[list[float], Direction]:
    """Delays of packets sent every `gap` seconds; lost ones are missing."""
    direction, delays = Direction(profile, seed=2), []
    for number in range(count):
        sent = number * gap
        before = len(direction._packets)
        direction.put(bytes(size), sent)
        if len(direction._packets) > before:
            delays.append(direction._packets[-1][0] - sent)
            direction.take(float("inf"))
    return delays, direction


def test_delay_jitter_and_loss_are_the_profile_s():
    profile = LinkProfile(delay_ms=40, jitter_ms=5, loss=0.02, **FAST)
    delays, direction = delays_of(profile, 20_000, 0.1)
    assert statistics.mean(delays) == pytest.approx(0.040, rel=0.05)
    assert statistics.stdev(delays) == pytest.approx(0.005, rel=0.05)
    assert direction.num_lost / 20_000 == pytest.approx(0.02, rel=0.1)


def test_a_round_trip_has_the_delay_once():
    each = LinkProfile(delay_ms=20, jitter_ms=4, **FAST)
    both = each.model_copy(update={"applies": "round_trip"})
    assert both.one_way[0] * 2 == each.one_way[0]
    assert both.one_way[1] ** 2 * 2 == pytest.approx(each.one_way[1] ** 2)


def test_a_transfer_takes_as_long_as_the_rate_allows_and_keeps_its_order():
    direction = Direction(LinkProfile(name="test", delay_ms=10, jitter_ms=5, rate_mbit=8), seed=3)
    packets = [number.to_bytes(2, "big") * 500 for number in range(300)]
    for number, packet in enumerate(packets):
        direction.put(packet, number * 1e-4)
    assert direction.take(0.29) != packets
    taken = Direction(LinkProfile(name="test", delay_ms=10, jitter_ms=5, rate_mbit=8), seed=3)
    for number, packet in enumerate(packets):
        taken.put(packet, number * 1e-4)
    assert taken.take(float("inf")) == packets
    assert taken._line_free_at == pytest.approx(0.3, rel=0.01), "300,000 bytes at 1 MB/s"


def test_a_full_queue_drops():
    direction = Direction(LinkProfile(name="test", delay_ms=0, rate_mbit=1), seed=0)
    for _ in range(1000):
        direction.put(bytes(1000), 0.0)
    assert direction.num_dropped > 900
    assert len(direction.take(float("inf"))) == 1000 - direction.num_dropped


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_tcp_over_an_emulated_network_has_its_round_trip_and_its_rate():
    profile = PROFILES["wan"]
    with emulated_link(profile, number=7) as link:
        server = socket.create_server((link.host, 0))
        port = server.getsockname()[1]
        thread = threading.Thread(target=_serve, args=(server,))
        thread.start()
        done = subprocess.run(
            link.command([sys.executable, "-c", _CLIENT, link.host, str(port)]),
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        thread.join(timeout=10)
        server.close()
    ping, rate = map(float, done.stdout.split())
    assert 0.009 <= ping < 0.02
    assert 20e6 < rate < 50e6
    assert link.counts["up_bytes"] > 1_000_000
    assert link.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


_CLIENT = """
import socket, statistics, sys, time
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(20):
    begin = time.monotonic(); link.sendall(b"p"); link.recv(1); times.append(time.monotonic() - begin)
begin = time.monotonic(); link.sendall(b"d" + bytes(2_000_000)); link.shutdown(1); link.recv(1)
print(statistics.median(times), 16_000_000 / (time.monotonic() - begin))
"""


def _serve(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (got := connection.recv(1)) == b"p":
            connection.sendall(b"p")
        assert got == b"d"
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"e")
        time.sleep(0.05)
