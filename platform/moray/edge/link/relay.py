"""The process between two TUN devices: passes IP packets from one to the other, as late as the network would.

    python -m moray.edge.link.relay FD FD PROFILE_JSON SEED

The file descriptors are inherited; `edge.link.namespaces` starts it. A line on its standard input, another profile,
changes the network. It ends when its standard input does, and then writes one line of JSON: what has passed, and its
own processor time.
"""

import json
import os
import select
import sys
import time

from moray.edge.link.emulator import Direction
from moray.edge.link.profiles import LinkProfile

_MAX_PACKET = 65_536
_AT_ONCE = 64
"""Packets that are read from one device before the other one gets a turn."""


def relay(first: int, second: int, profile: LinkProfile, seed: int, control: int) -> dict[str, float]:
    """Pass packets until `control` ends; returns the counts.

    Args:
        first: device of the server.
        second: device of the client.
        profile: of both directions.
        seed: of the random numbers.
        control: file descriptor that other profiles are read from, one line each.
    """
    ways = {first: (second, Direction(profile, 2 * seed)), second: (first, Direction(profile, 2 * seed + 1))}
    while True:
        now = time.monotonic()
        for out, direction in ways.values():
            for packet in direction.take(now):
                _write(out, packet)
        due = [direction.next_at for _, direction in ways.values() if direction.next_at is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([first, second, control], [], [], timeout)
        if control in readable:
            line = os.read(control, _MAX_PACKET)
            if not line:
                break
            for _, direction in ways.values():
                direction.profile = LinkProfile.model_validate_json(line.splitlines()[-1])
        now = time.monotonic()
        for device in readable:
            if device == control:
                continue
            for packet in _read(device):
                ways[device][1].put(packet, now)
    down, up = ways[first][1], ways[second][1]
    return {
        "down_bytes": down.num_bytes,
        "up_bytes": up.num_bytes,
        "num_lost": down.num_lost + up.num_lost,
        "num_dropped": down.num_dropped + up.num_dropped,
        "cpu_seconds": time.process_time(),
    }


def _read(device: int) -> list[bytes]:
    packets: list[bytes] = []
    while len(packets) < _AT_ONCE:
        try:
            packets.append(os.read(device, _MAX_PACKET))
        except BlockingIOError:
            break
    return packets


def _write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:  # the other side is going down: the packet is lost, as on any network
        return


if __name__ == "__main__":
    first, second, profile, seed = sys.argv[1:]
    counts = relay(int(first), int(second), LinkProfile.model_validate_json(profile), int(seed), sys.stdin.fileno())
    print(json.dumps(counts))
