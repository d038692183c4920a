"""A network between this machine and a namespace of it: real TCP over two TUN devices and a relay (Linux, as root).

    this machine  10.77.N.1  tun  <-  relay: rate, delay, loss  ->  tun  10.77.N.2  the device's namespace

Programs of the device run inside the namespace (`EmulatedLink.command`) and reach nothing but this machine.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moray.edge.link.profiles import LinkProfile
from moray.errors import ConfigError

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


@dataclass
class EmulatedLink:
    """An emulated network while it is there."""

    host: str
    """This machine's address in it."""
    device: str
    """The address inside the namespace."""
    namespace: str
    interface: str
    """Name of this machine's TUN device."""
    counts: dict[str, float] = field(default_factory=dict)
    """What has passed; filled when the network goes down."""
    _relay: "subprocess.Popen[str] | None" = None

    def change(self, profile: LinkProfile) -> None:
        """Make it another network; what is on its way arrives as it would have."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(profile.model_dump_json() + "\n")
        self._relay.stdin.flush()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of IP packets so far: to this machine, and to the device."""
        folder = Path("/sys/class/net", self.interface, "statistics")  # seen from the driver of the TUN device
        return int((folder / "rx_bytes").read_text()), int((folder / "tx_bytes").read_text())

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that runs inside the namespace."""
        return ["ip", "netns", "exec", self.namespace, *words]


def why_not() -> str | None:
    """Why this machine cannot emulate networks; None if it can."""
    if os.geteuid() != 0:
        return "root is needed to make network namespaces"
    if not _TUN.exists():
        return f"{_TUN} is missing"
    if shutil.which("ip") is None:
        return "the program `ip` (iproute2) is missing"
    return None


@contextmanager
def emulated_link(profile: LinkProfile, number: int = 0, seed: int = 0) -> Iterator[EmulatedLink]:
    """Bring a network up, and down at the end.

    Args:
        profile: what it is like.
        number: tells networks of one process that exist at the same time apart; 0 to 99.
        seed: of its random numbers.

    Raises:
        ConfigError: this machine cannot do so (see `why_not`).
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError(f"network '{profile.name}' cannot be emulated here: {reason}")
    name, subnet = f"moray{os.getpid()}-{number}", f"10.77.{100 + number}"
    tuns = [f"mt{os.getpid() % 100_000}{end}{number}" for end in "ab"]
    link = EmulatedLink(f"{subnet}.1", f"{subnet}.2", name, tuns[0])
    _ip("netns", "add", name)
    devices: list[int] = []
    relay: subprocess.Popen[str] | None = None
    try:
        devices = [_open_tun(tun) for tun in tuns]
        _ip("link", "set", tuns[1], "netns", name)
        for words, tun, address in (((), tuns[0], link.host), (("-n", name), tuns[1], link.device)):
            _ip(*words, "addr", "add", f"{address}/30", "dev", tun)
            _ip(*words, "link", "set", tun, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        relay = subprocess.Popen(
            [sys.executable, "-m", "moray.edge.link.relay", *map(str, devices), profile.model_dump_json(), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=devices,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        link._relay = relay
        yield link
    finally:
        if relay is not None:
            out, _ = relay.communicate()
            link.counts.update(json.loads(out) if out.strip() else {})
        for device in devices:
            os.close(device)
        _ip("netns", "del", name)


def _open_tun(name: str) -> int:
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
