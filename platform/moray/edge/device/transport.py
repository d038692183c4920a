"""A device's connection to the server: an interface, and WebSockets."""

import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn
from urllib.parse import urlsplit

from moray.edge.messages import SUBPROTOCOL
from moray.errors import ConfigError, DataError, MorayError, UnreachableError

_CONNECT_SECONDS = 10.0
_PING_SECONDS = 5.0
_PROBE_SECONDS = 0.25
"""Silence after which a waiting device asks for a sign of life."""
_MAX_DOWN = 64 << 20
"""Maximum bytes of one message from the server."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Link(ABC):
    """One connection; it is used until it breaks, and never again."""

    @abstractmethod
    def send(self, text: str) -> None:
        """Send a message.

        Raises:
            UnreachableError: the connection is broken.
        """

    @abstractmethod
    def receive(self, seconds: float) -> bytes | None:
        """The next message; None if none comes within so many seconds.

        Raises:
            UnreachableError: the connection is broken, or the server has closed it.
        """

    @property
    @abstractmethod
    def silent_seconds(self) -> float:
        """Seconds since anything was heard of the server, or since the last message to it. Asks it for a sign of life
        from time to time."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; no effect on a broken one."""


Dial = Callable[[], Link]
"""Opens a connection, or raises UnreachableError."""


class WebSocketLink(Link):
    """A connection over a WebSocket."""

    def __init__(
        self, url: str, key: str | None = None, ca_file: str | None = None, *, allows_plain: bool = False
    ) -> None:
        """
        Args:
            url: ws://HOST:PORT/v1/edge on this machine, wss://... elsewhere.
            key: bearer key.
            ca_file: PEM file with the certificates to trust; None for the system's.
            allows_plain: accept ws:// for another machine too, on a private network.

        Raises:
            ConfigError: the URL is not accepted.
            UnreachableError: there is no server, or it refuses the connection.
        """
        from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI
        from websockets.sync.client import connect

        if not allows_plain:
            check_url(url)
        self._stack = ExitStack()
        headers = {"Authorization": f"Bearer {key}"} if key else None
        context = _context(ca_file) if url.startswith("wss:") else None
        try:
            opened = connect(
                url,
                subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
                additional_headers=headers,
                ssl=context,
                open_timeout=_CONNECT_SECONDS,
                close_timeout=1,
                ping_interval=_PING_SECONDS,
                ping_timeout=3 * _PING_SECONDS,
                max_size=_MAX_DOWN,
                compression=None,
                proxy=None,
            )
            self._socket = self._stack.enter_context(opened)
        except InvalidStatus as error:
            raise _refused(url, error.response.status_code) from None
        except InvalidURI as error:
            raise ConfigError(f"url is '{url}', which is no WebSocket address: {error}") from None
        except ssl.SSLCertVerificationError as error:
            raise DataError(
                f"the certificate of {url} is not trusted ({error.verify_message}): name the file of its authority in "
                "ca_file"
            ) from None
        except (InvalidHandshake, OSError, EOFError) as error:
            raise UnreachableError(f"no connection to {url}: {error or type(error).__name__}") from None
        self._heard = time.monotonic()
        self._pinged = self._heard
        self._pong: threading.Event | None = None

    def send(self, text: str) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(text)
            self._heard = time.monotonic()
        except (ConnectionClosed, OSError) as error:
            _lost(error)

    def receive(self, seconds: float) -> bytes | None:
        from websockets.exceptions import ConnectionClosed

        try:
            message = self._socket.recv(timeout=seconds)
        except TimeoutError:
            return None
        except (ConnectionClosed, OSError) as error:
            _lost(error)
        self._heard = time.monotonic()
        if isinstance(message, str):
            raise DataError("the server sent text where a frame is needed: it is no server of this protocol")
        return message

    @property
    def silent_seconds(self) -> float:
        from websockets.exceptions import ConnectionClosed

        now = time.monotonic()
        if self._pong is not None and self._pong.is_set():
            self._heard, self._pong = now, None
        if self._pong is None and now - max(self._heard, self._pinged) > _PROBE_SECONDS:
            try:
                self._pong, self._pinged = self._socket.ping(), now
            except (ConnectionClosed, OSError) as error:
                _lost(error)
        return now - self._heard

    def close(self) -> None:
        self._stack.close()


def check_url(url: str) -> None:
    """Refuse an address that is not a WebSocket's, or that would send text over a network without TLS.

    Raises:
        ConfigError: says what is accepted.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ConfigError(f"url is '{url}'; wss://HOST/v1/edge is needed, or ws://localhost:PORT/v1/edge")
    if parts.scheme == "ws" and parts.hostname not in _LOOPBACK:
        raise ConfigError(f"url is '{url}', which would send text unencrypted over a network: use wss://")


def _context(ca_file: str | None) -> ssl.SSLContext:
    """What certificates are checked with.

    Raises:
        ConfigError: the file holds no certificates.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl's own errors are OSErrors too
        raise ConfigError(f"ca_file is '{ca_file}', which holds no certificates: {error.strerror or error}") from None


def _refused(url: str, status: int) -> MorayError:
    """The error for an HTTP status in place of a connection."""
    if status in (401, 403):
        return DataError(f"{url} answers {status}: it needs a valid key, which key_file names")
    if status == 404:  # Serve's proxy says so as well while the application starts
        return UnreachableError(f"{url} answers 404: is the server's `edge` set, and has it started?")
    return UnreachableError(f"{url} answers {status}")


def _lost(error: Exception) -> NoReturn:
    raise UnreachableError(f"the connection is broken: {error or type(error).__name__}") from None
