"""The server's part of one session that outlives its connections: what was sent, what was received, who may resume.

A session is a reliable stream in both directions over connections that may break at any time. Each side numbers its
messages; the server keeps what the device has not received, and takes each `Verify` once.
"""

import base64
import hashlib
import hmac
import struct
import time
from collections import deque
from collections.abc import Callable

from moray.edge.messages import Verify
from moray.edge.server.replies import Reply
from moray.errors import DataError

MAX_UNRECEIVED_BYTES = 16 << 20
"""Bytes of messages that are kept for a device. Beyond it, the oldest are dropped, and the session cannot be resumed
before them: the device opens it again."""
_EXPIRY = struct.Struct(">Q")
_DIGEST_BYTES = 32
Send = Callable[[bytes], None]


class SessionEndedError(DataError):
    """The session cannot go on from where the device is."""


class ServerSession:
    """One device's sequence, as the process that holds its connection knows it."""

    def __init__(self, name: str, owner: str) -> None:
        """
        Args:
            name: of the session; a random one.
            owner: the key that opened it, by number, or the address without keys.
        """
        self.name = name
        self.owner = owner
        self.last_seq = 0
        """The last `Verify` that was received."""
        self.is_open = False
        """Whether its sequence has begun."""
        self.is_answered = True
        """Whether the server has sent something since the device's last message."""
        self.is_finished = False
        """Whether the answer has ended."""
        self.send: Send | None = None
        """Sends a frame over the connection that the session has now; None while it has none."""
        self.heard_at = 0.0
        """When the device was last heard of."""
        self._frames: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        """Index of the last message that is no longer kept."""

    def receive(self, verify: Verify) -> bool:
        """Note a `Verify`; return whether it is new. One that was sent again after a cut is not.

        Raises:
            DataError: one before it is missing.
        """
        self.forget(verify.received)
        if verify.seq <= self.last_seq:
            return False
        if verify.seq != self.last_seq + 1:
            raise DataError(f"verify {verify.seq} came after {self.last_seq}: send every one, in order")
        self.last_seq = verify.seq
        return True

    def add(self, reply: Reply) -> None:
        """Send a message, and keep it until the device has received it."""
        if self.send is not None:
            self.send(reply.frame)
        self.is_answered = True
        self._frames.append((reply.index, reply.frame))
        self._num_bytes += len(reply.frame)
        self.is_finished |= reply.is_finished
        while self._num_bytes > MAX_UNRECEIVED_BYTES:
            self._drop_first()

    def forget(self, received: int) -> None:
        """Drop the messages that the device has received."""
        while self._frames and self._frames[0][0] <= received:
            self._drop_first()

    def after(self, received: int) -> list[bytes]:
        """The frames after the last one that the device has received.

        Raises:
            SessionEndedError: some of them are no longer kept.
        """
        if received < self._num_dropped:
            raise SessionEndedError(
                f"messages after {received} are asked for, but those up to {self._num_dropped} are no longer kept: "
                "open the session again"
            )
        self.forget(received)
        return [frame for _, frame in self._frames]

    def _drop_first(self) -> None:
        index, frame = self._frames.popleft()
        self._num_bytes -= len(frame)
        self._num_dropped = max(self._num_dropped, index)


class ResumeTokens:
    """Signs and checks what a device shows to take up its session: only the key that opened it can."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            secret: of this server process.
            clock: seconds since 1970.
        """
        self._secret = secret
        self._clock = clock

    def sign(self, session: str, owner: str, seconds: float) -> str:
        """A token that is valid for so many seconds."""
        head = _EXPIRY.pack(int(self._clock() + seconds))
        return base64.urlsafe_b64encode(head + self._digest(session, owner, head)).decode()

    def check(self, token: str, session: str, owner: str) -> bool:
        """Whether a token is one of this session and key, and has not expired."""
        try:
            raw = base64.urlsafe_b64decode(token.encode())
        except ValueError:
            return False
        if len(raw) != _EXPIRY.size + _DIGEST_BYTES:
            return False
        head, digest = raw[: _EXPIRY.size], raw[_EXPIRY.size :]
        is_ours = hmac.compare_digest(digest, self._digest(session, owner, head))
        return is_ours and self._clock() < _EXPIRY.unpack(head)[0]

    def _digest(self, session: str, owner: str, head: bytes) -> bytes:
        signed = b"\0".join((session.encode(), owner.encode(), head))
        return hmac.new(self._secret, signed, hashlib.sha256).digest()
