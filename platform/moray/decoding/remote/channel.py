"""How frames get to a drafter and back: an interface, and sockets.

The engine's thread sends a frame and goes on; it waits for the answer only when it needs it, and no longer than it
was told to. A broken channel is an event like any other.
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

from moray.decoding.remote.messages import MAX_FRAME
from moray.errors import UnreachableError

_LOGGER = logging.getLogger(__name__)
_LENGTH = struct.Struct(">Q")
_SECRET_BYTES = 32
_CONNECT_SECONDS = 0.5
_SEND_SECONDS = 2.0
_MIN_RATE = 50e6
"""Bytes per second; a slower way is given up."""


class Channel(ABC):
    """One way to one drafter process; answers come in the order of the frames."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Hand over a frame.

        Raises:
            UnreachableError: the other side is gone.
        """

    @abstractmethod
    def receive(self, seconds: float) -> bytes | bytearray | None:
        """The next answer, or None if none came in so many seconds.

        Raises:
            UnreachableError: the other side is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the channel."""


@dataclass(frozen=True)
class Endpoint:
    """Where a drafter process listens, and the secret that lets in."""

    host: str
    port: int
    secret: str
    """Hexadecimal."""
    replica: str
    """Tells processes apart."""

    def __repr__(self) -> str:
        return f"Endpoint({self.host}:{self.port}, {self.replica})"  # never the secret


class SocketChannel(Channel):
    """TCP, without delay; the first thing sent is the secret."""

    def __init__(self, endpoint: Endpoint) -> None:
        """
        Raises:
            UnreachableError: nobody listens there.
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
                self._socket.settimeout(max(0.0, end - time.monotonic()))  # 0 takes what has come already
                self._inbox.fill(self._socket)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise UnreachableError(f"the drafter is gone: {error}") from None
        return frame

    def close(self) -> None:
        self._socket.close()


class _Inbox:
    """Bytes that have come, cut into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def fill(self, connection: socket.socket) -> None:
        """Take what is there.

        Raises:
            OSError: the other side has closed.
        """
        new = connection.recv(1 << 20)
        if not new:
            raise ConnectionResetError("closed by the other side")
        self._bytes += new

    def take(self, count: int) -> bytes | None:
        """The next `count` bytes once they are there."""
        if len(self._bytes) < count:
            return None
        taken = bytes(self._bytes[:count])
        del self._bytes[:count]
        return taken

    def next(self) -> bytearray | None:
        """The next whole frame.

        Raises:
            OSError: too long a one was announced.
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
    """Answers frames in a thread of its own, one at a time."""

    def __init__(
        self, answer: Callable[[bytearray], bytes], host: str, secret: str, go_on: Callable[[], bool] | None = None
    ) -> None:
        """
        Args:
            answer: called with each frame; a connection whose frame makes it fail is closed.
            host: address to listen at.
            secret: hexadecimal, 32 bytes; who does not send it first is not listened to.
            go_on: called whenever nothing has come, for as long as it says that there is more to do; frames wait for
                it, so it should be brief.
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
        """End the thread and all connections."""
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
        """Go on with what nobody waits for; whether there is more of it."""
        try:
            return self._go_on is not None and self._go_on()
        except Exception:  # what is asked for is still answered
            _LOGGER.exception("drafting ahead failed")
            return False

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may vanish
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
        except Exception as error:  # noqa: BLE001 - one connection's trouble is not the others'
            if not isinstance(error, ConnectionResetError):
                _LOGGER.warning("a connection for drafts is closed: %s: %s", type(error).__name__, error)
            self._selector.unregister(connection)
            connection.close()

    def _is_let_in(self, guest: _Guest) -> bool:
        """Whether the secret has come, which has to be there before any frame.

        Raises:
            ConnectionAbortedError: it is another.
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
