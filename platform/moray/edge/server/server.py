"""The server's part of the protocol, for all sessions of one process. Does no input or output itself.

The caller holds the connections and passes in what arrives and a function that sends; a `Backend` has the target. So
the same code runs behind a WebSocket and in tests.
"""

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moray.decoding.remote.frames import pack_frame
from moray.edge.messages import (
    VERSION,
    Cancel,
    CodecName,
    Hello,
    Open,
    RefusalCode,
    Refused,
    Resume,
    Resumed,
    Verify,
    Welcome,
    decode_up,
)
from moray.edge.server.session import ResumeTokens, Send, ServerSession, SessionEndedError
from moray.errors import DataError

_LOGGER = logging.getLogger("ray.serve")
_TOKEN_SECONDS = 24 * 3600.0


class Backend(ABC):
    """Where the target is. No method waits; what comes of them is added to the session."""

    @abstractmethod
    def open(self, session: ServerSession, message: Open, codec: CodecName) -> None:
        """Begin a sequence."""

    @abstractmethod
    def offer(self, session: ServerSession, verify: Verify) -> None:
        """Verify a draft of a sequence."""

    @abstractmethod
    def cancel(self, session: ServerSession) -> None:
        """End a sequence; no effect if it has ended."""

    @abstractmethod
    def note_resumed(self) -> None:
        """A session has been taken up again, for statistics."""

    @abstractmethod
    def note_refused(self, code: RefusalCode) -> None:
        """A device has been refused, for statistics."""


@dataclass(frozen=True)
class Served:
    """What a device must have in common with this server."""

    target: str
    """Fingerprint of the target."""
    text: str
    """Fingerprint of tokenizer and chat template."""
    drafters: Mapping[str, str]
    """Fingerprints of the drafters that devices may use, by name."""
    codecs: tuple[CodecName, ...] = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Limits:
    """What devices may ask for."""

    max_model_len: int
    max_nodes: int
    max_in_flight: int = 2
    max_sessions: int = 8
    """Sessions that may exist at once, in this process."""
    max_sessions_per_key: int = 8
    idle_seconds: float = 60.0
    """Seconds after which a session is dropped whose device was not heard of."""


class RefusedError(DataError):
    """A device is refused; the connection ends with this message."""

    def __init__(self, code: RefusalCode, message: str, retry_ms: int = 0) -> None:
        super().__init__(message)
        self.code: RefusalCode = code
        self.frame = pack_frame(Refused(code=code, message=message, retry_ms=retry_ms))


class EdgeServer:
    """All sessions of one process."""

    def __init__(
        self, served: Served, limits: Limits, backend: Backend, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            served: what devices must have in common with this server.
            limits: what they may ask for.
            backend: has the target.
            clock: seconds.
        """
        self.served = served
        self.limits = limits
        self.backend = backend
        self.clock = clock
        self.tokens = ResumeTokens(secrets.token_bytes(32))
        self.sessions: dict[str, ServerSession] = {}

    @property
    def num_running(self) -> int:
        """Sessions whose answers have not ended."""
        return sum(not session.is_finished for session in self.sessions.values())

    def connect(self, owner: str, send: Send) -> "ServerConnection":
        """A new connection of a client with this key."""
        return ServerConnection(self, owner, send)

    def add(self, owner: str) -> ServerSession:
        """A new session.

        Raises:
            RefusedError: there are too many.
        """
        self.sweep()
        running = [session.owner for session in self.sessions.values() if not session.is_finished]
        if len(running) >= self.limits.max_sessions or running.count(owner) >= self.limits.max_sessions_per_key:
            raise RefusedError("full", "all sessions are taken: try again later", retry_ms=1000)
        session = ServerSession(secrets.token_hex(16), owner)
        session.heard_at = self.clock()
        self.sessions[session.name] = session
        return session

    def drop(self, session: ServerSession) -> None:
        """Forget a session and end its sequence."""
        if self.sessions.pop(session.name, None) is not None:
            self.backend.cancel(session)

    def fail(self, session: ServerSession, error: RefusedError) -> None:
        """End a session whose target is lost or has refused it, and tell its device if it is there."""
        if session.send is not None:
            self.backend.note_refused(error.code)
            session.send(error.frame)
        self.drop(session)

    def sweep(self) -> None:
        """Drop the sessions of devices that were not heard of for too long. A device that is connected and waits for
        the server is not idle."""
        limit = self.clock() - self.limits.idle_seconds
        old = [session for session in self.sessions.values() if session.heard_at < limit]
        for session in [session for session in old if session.send is None or session.is_answered]:
            _LOGGER.info("edge session %s was idle for %g s and is dropped", session.name[:8], self.limits.idle_seconds)
            self.fail(session, RefusedError("session", "the session was idle for too long: open it again"))


class ServerConnection:
    """One connection of a device: `Hello`, then one session after the other; the first may be taken up again."""

    def __init__(self, server: EdgeServer, owner: str, send: Send) -> None:
        self._server = server
        self._owner = owner
        self._send = send
        self._hello: Hello | None = None
        self._session: ServerSession | None = None
        self.is_closed = False
        """Whether the device was refused: the connection is to be closed once everything has been sent."""

    def receive(self, text: str | bytes) -> None:
        """Handle a message of the device."""
        try:
            self._handle(text)
        except RefusedError as error:
            self._refuse(error)
        except SessionEndedError as error:
            self._refuse(RefusedError("session", str(error)))
        except DataError as error:
            self._refuse(RefusedError("bad_message", str(error)))

    def lost(self) -> None:
        """The connection is gone; its session waits for the device to come back."""
        if self._session is not None and self._session.send is self._send:
            self._session.send = None
            if self._session.is_finished:
                self._server.drop(self._session)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is going on over it."""
        session = self._session
        return session is None or session.is_finished or session.name not in self._server.sessions

    def alive(self) -> None:
        """The device has shown a sign of life."""
        if self._session is not None:
            self._session.heard_at = self._server.clock()

    def _refuse(self, error: RefusedError) -> None:
        self.is_closed = True
        self._server.backend.note_refused(error.code)
        self._send(error.frame)
        if self._session is not None and self._session.send is self._send:
            self._server.drop(self._session)

    def _handle(self, text: str | bytes) -> None:
        message = decode_up(text)
        self.alive()
        if isinstance(message, Hello):
            self._greet(message)
        elif self._hello is None:
            raise DataError(f"'{message.type}' came before 'hello'")
        elif isinstance(message, Open):
            self._open(message, self._hello)
        elif isinstance(message, Resume):
            self._resume(message)
        elif isinstance(message, Verify):
            session = self._own()
            session.is_answered = False
            if session.receive(message):
                self._server.backend.offer(session, message)
        else:
            assert isinstance(message, Cancel)
            self._server.drop(self._own())

    def _greet(self, hello: Hello) -> None:
        served = self._server.served
        if self._hello is not None:
            raise DataError("'hello' came twice")
        if VERSION not in hello.versions:
            raise RefusedError("version", f"this server speaks version {VERSION}, the device {hello.versions}")
        if hello.target != served.target:
            raise RefusedError(
                "target", f"the device's drafter is for target {hello.target}, this server's is {served.target}"
            )
        if hello.text != served.text:
            raise RefusedError(
                "text",
                f"the device's tokenizer and chat template are {hello.text}, this server's are {served.text}: use the "
                "server's",
            )
        if hello.drafter not in served.drafters:
            known = ", ".join(served.drafters) or "none"
            raise RefusedError("drafter", f"drafter '{hello.drafter}' is not served to devices; there are: {known}")
        if hello.drafter_fingerprint != served.drafters[hello.drafter]:
            raise RefusedError(
                "drafter",
                f"drafter '{hello.drafter}' is {hello.drafter_fingerprint} on the device and "
                f"{served.drafters[hello.drafter]} here: copy the server's",
            )
        if hello.codec not in served.codecs:
            known = ", ".join(served.codecs)
            raise RefusedError("codec", f"codec is '{hello.codec}'; this server accepts {known}")
        self._hello = hello
        self._begin_session()

    def _begin_session(self) -> None:
        """Make a session for this connection, and say so."""
        self._session = self._server.add(self._owner)
        self._session.send = self._send
        limits = self._server.limits
        welcome = Welcome(
            version=VERSION,
            session=self._session.name,
            resume_token=self._server.tokens.sign(self._session.name, self._owner, _TOKEN_SECONDS),
            max_model_len=limits.max_model_len,
            max_nodes=limits.max_nodes,
            max_in_flight=limits.max_in_flight,
            idle_seconds=limits.idle_seconds,
        )
        self._send(pack_frame(welcome))

    def _open(self, message: Open, hello: Hello) -> None:
        if self._session is not None and self._session.is_finished:  # the next answer over the same connection
            self._server.drop(self._session)
            self._begin_session()
        session = self._own()
        if session.is_open:
            raise DataError("'open' came twice: one session has one sequence")
        if message.request.drafter != hello.drafter:
            raise DataError(f"drafter is '{message.request.drafter}', but 'hello' named '{hello.drafter}'")
        if message.request.logprobs is not None:
            raise DataError("request.logprobs is not supported here: leave it out")
        session.is_open, session.is_answered = True, False
        self._server.backend.open(session, message, hello.codec)

    def _resume(self, message: Resume) -> None:
        fresh = self._own()
        if fresh.is_open:
            raise DataError("'resume' came after 'open'")
        if not self._server.tokens.check(message.token, message.session, self._owner):
            raise RefusedError("token", "the resume token is not one of this session and key, or has expired")
        session = self._server.sessions.get(message.session)
        if session is None:
            raise SessionEndedError("the session is not known here any more: open it again")
        frames = session.after(message.received)
        self._server.drop(fresh)
        self._session = session
        session.send = self._send
        self.alive()
        self._server.backend.note_resumed()
        self._send(pack_frame(Resumed(last_seq=session.last_seq)))
        for frame in frames:
            self._send(frame)

    def _own(self) -> ServerSession:
        if self._session is None or self._session.name not in self._server.sessions:
            raise SessionEndedError("the session has ended: open another one")
        return self._session
