"""Messages over one connection: packs, unpacks and counts them, and turns refusals into errors."""

from collections.abc import Mapping
from time import monotonic
from typing import TypeVar

from torch import Tensor

from moray.decoding.remote.frames import unpack_frame
from moray.edge.device.stats import EdgeStats
from moray.edge.device.transport import Link
from moray.edge.messages import DownMessage, Message, Refused, UpMessage, Verified, decode_down, encode_up
from moray.errors import DataError, MismatchError, UnreachableError

WAIT_SECONDS = 0.05
"""How long to wait for a message before the connection is looked after."""
AnyMessage = TypeVar("AnyMessage", bound=Message)


class SessionLostError(UnreachableError):
    """The server does not know the session any more."""


class TryLaterError(UnreachableError):
    """The server has no room now."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class ServerConnection:
    """A device's end of one connection."""

    def __init__(self, link: Link, stats: EdgeStats, offline_after_seconds: float) -> None:
        """
        Args:
            link: the connection.
            stats: counts bytes.
            offline_after_seconds: see `EdgeConfig`.
        """
        self.link = link
        self.tensors: Mapping[str, Tensor] = {}
        """Of the last message."""
        self.num_bytes = 0
        """Of the last message."""
        self.arrived = 0.0
        """When the last message arrived."""
        self._stats = stats
        self._offline_after_seconds = offline_after_seconds

    def send(self, message: UpMessage) -> None:
        """Send a message.

        Raises:
            UnreachableError: the connection is broken, or the server has no room.
            MismatchError: the server has closed it, because device and server do not belong together.
            DataError: the server has closed it, because it refuses the request.
        """
        text = encode_up(message)
        self._stats.num_bytes_up += len(text)
        try:
            self.link.send(text)
        except UnreachableError:
            self._raise_waiting_refusal()
            raise

    def receive(self, seconds: float) -> Verified | None:
        """The next message of a sequence; None if none comes within so many seconds.

        Raises:
            UnreachableError: the connection is broken, or the session is lost.
            MismatchError: device and server do not belong together.
            DataError: the server refuses the request, or the message is none of this protocol.
        """
        message = self._next(seconds)
        if message is None or isinstance(message, Verified):
            return message
        if isinstance(message, Refused):
            raise _refusal(message)
        raise DataError(f"the server sent '{message.type}' in the middle of a sequence")

    def expect(self, kind: type[AnyMessage]) -> AnyMessage:
        """Wait for a message of this kind; errors as for `receive`."""
        while True:
            message = self._next(WAIT_SECONDS)
            if isinstance(message, kind):
                return message
            if isinstance(message, Refused):
                raise _refusal(message)
            if message is not None:
                raise DataError(f"the server sent '{message.type}' where '{kind.__name__.lower()}' is needed")
            self.check_silence()

    def check_silence(self) -> float:
        """Seconds since anything was heard of the server.

        Raises:
            UnreachableError: they are too many.
        """
        try:
            silent = self.link.silent_seconds
        except UnreachableError:
            self._raise_waiting_refusal()
            raise
        if silent > self._offline_after_seconds:
            raise UnreachableError(f"nothing heard of the server for {self._offline_after_seconds:g} s")
        return silent

    def _raise_waiting_refusal(self) -> None:
        """Raise the refusal that has arrived but has not been read, if there is one: a server that refuses closes the
        connection at once, often before the device sends its next message."""
        while True:
            try:
                message = self._next(0)
            except UnreachableError:
                return
            if message is None:
                return
            if isinstance(message, Refused):
                raise _refusal(message)

    def _next(self, seconds: float) -> DownMessage | None:
        frame = self.link.receive(seconds)
        if frame is None:
            return None
        self.arrived, self.num_bytes = monotonic(), len(frame)
        self._stats.num_bytes_down += len(frame)
        words, self.tensors = unpack_frame(frame)
        return decode_down(words)


def _refusal(message: Refused) -> Exception:
    if message.code in ("target", "text", "drafter", "version"):
        return MismatchError(message.message)
    if message.code in ("session", "token"):  # a restarted server does not know its tokens any more
        return SessionLostError(message.message)
    if message.code in ("codec", "bad_message"):
        return DataError(message.message)
    return TryLaterError(message.message, message.retry_ms / 1000)
