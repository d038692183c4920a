"""Transport of frames to a drafter and back: an interface, and sockets.

The engine's thread sends a frame and goes on. It waits for the reply only when it needs it, and only for a limited
time. A broken channel is an expected event.
"""

import hmac
import logging
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from moray.decoding.remote.frames import MAX_FRAME
from moray.errors import UnreachableError

_LOGGER = logging.getLogger(__name__)
_LENGTH = struct.Struct(">Q")
_SECRET_BYTES = 32
_CONNECT_SECONDS = 0.5
_SEND_SECONDS = 2.0
_MIN_RATE = 50e6
"""Bytes per second; a connection that is slower is given up."""


class Channel(ABC):
    """A connection to one drafter process; replies come in the order of the requests."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            UnreachableError: the other side is gone.
        """

    @abstractmethod
    def receive(self, seconds: float) -> bytes | bytearray | None:
        """Return the next reply, or None if none came within `seconds`.

        Raises:
            UnreachableError: the other side is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a drafter process, and the secret that it requires."""

    host: str
    port: int
    secret: str
    """Hexadecimal."""
    replica: str
    """Id of the process."""

    def __repr__(self) -> str:
        return f"Endpoint({self.host}:{self.port}, {self.replica})"  # never the secret


class SocketChannel(Channel):
    """TCP without Nagle's delay; it sends the secret first."""

    def __init__(self, endpoint: Endpoint) -> None:
        """
        Raises:
            UnreachableError: nothing listens there.
        """
        try:
            self._socket = socket.create_connection((endpoint.host, endpoint.port), timeout=_CONNECT_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(bytes.fromhex(endpoint.secret))
        except OSError as error:
            raise UnreachableError(f"no drafter answers at {endpoint.host}:{endpoint.port}: {error}") from None
        self._inbox = _Inbox()

    def send(self, frame: bytes) -> None:
        try:
            self._socket.settimeout(_SEND_SECONDS + len(frame) / _MIN_RATE)
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise UnreachableError(f"the drafter is gone: {error}") from None

    def receive(self, seconds: float) -> bytes | bytearray | None:
        end = time.monotonic() + seconds
        try:
            while (frame := self._inbox.next()) is None:
                self._socket.settimeout(max(0.0, end - time.monotonic()))  # 0 takes only what has arrived
                self._inbox.fill(self._socket)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise UnreachableError(f"the drafter is gone: {error}") from None
        return frame

    def close(self) -> None:
        self._socket.close()


class _Inbox:
    """Received bytes, split into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def fill(self, connection: socket.socket) -> None:
        """Read what has arrived.

        Raises:
            OSError: the other side has closed the connection.
        """
        new = connection.recv(1 << 20)
        if not new:
            raise ConnectionResetError("closed by the other side")
        self._bytes += new

    def take(self, count: int) -> bytes | None:
        """The next `count` bytes, or None if fewer have arrived."""
        if len(self._bytes) < count:
            return None
        taken = bytes(self._bytes[:count])
        del self._bytes[:count]
        return taken

    def next(self) -> bytearray | None:
        """The next complete frame, or None.

        Raises:
            OSError: the announced length is too large.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MAX_FRAME:
            raise ConnectionAbortedError(f"a frame of {length} bytes was announced")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        frame = self._bytes[_LENGTH.size : end]
        del self._bytes[:end]
        return frame


@dataclass
class _Guest:
    """One connection of a server."""

    inbox: _Inbox
    is_let_in: bool = False


class SocketServer:
    """Answers frames in its own thread, one at a time."""

    def __init__(
        self, answer: Callable[[bytearray], bytes], host: str, secret: str, go_on: Callable[[], bool] | None = None
    ) -> None:
        """
        Args:
            answer: called with each frame; if it fails, the connection of that frame is closed.
            host: address to listen on.
            secret: hexadecimal, 32 bytes; a client must send it before anything else.
            go_on: called when no frame is waiting, until it returns False; it delays frames, so it should be short.
        """
        self._answer = answer
        self._go_on = go_on
        self._secret = bytes.fromhex(secret)
        assert len(self._secret) == _SECRET_BYTES
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether frames are answered."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread and close all connections."""
        self._wake.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        is_busy = False
        while True:
            events = self._selector.select(0 if is_busy else None)
            if not events:
                is_busy = self._work()
                continue
            is_busy = self._go_on is not None
            for key, _ in events:
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._welcome()
                else:
                    self._serve(key.fileobj, key.data)  # type: ignore[arg-type]

    def _work(self) -> bool:
        """Do background work; return whether there is more of it."""
        try:
            return self._go_on is not None and self._go_on()
        except Exception:  # requests are still answered
            _LOGGER.exception("drafting ahead failed")
            return False

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a machine that is gone
        connection.settimeout(_SEND_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, _Guest(_Inbox()))

    def _serve(self, connection: socket.socket, guest: _Guest) -> None:
        try:
            guest.inbox.fill(connection)
            if not self._is_let_in(guest):
                return
            while (frame := guest.inbox.next()) is not None:
                reply = self._answer(frame)
                connection.sendall(_LENGTH.pack(len(reply)) + reply)
        except Exception as error:  # noqa: BLE001 - one bad connection must not end the others
            if not isinstance(error, ConnectionResetError):
                _LOGGER.warning("a connection for drafts is closed: %s: %s", type(error).__name__, error)
            self._selector.unregister(connection)
            connection.close()

    def _is_let_in(self, guest: _Guest) -> bool:
        """Whether the secret has arrived, which must come before any frame.

        Raises:
            ConnectionAbortedError: it is the wrong one.
        """
        if not guest.is_let_in and (secret := guest.inbox.take(_SECRET_BYTES)) is not None:
            if not hmac.compare_digest(secret, self._secret):
                raise ConnectionAbortedError("a wrong secret was sent")
            guest.is_let_in = True
        return guest.is_let_in

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()
