"""An edge server in the test's own process: the real protocol and the real engine, over connections that break when
the test wants."""

from collections import deque
from collections.abc import Callable

from moray.decoding.engine.engine import Engine
from moray.edge.device.transport import Link
from moray.edge.messages import CodecName, Open, RefusalCode, Verify
from moray.edge.server.replies import ReplyWriter, client_memory_of, offer_of
from moray.edge.server.server import Backend, EdgeServer, Limits, RefusedError, Served, ServerConnection
from moray.edge.server.session import ServerSession
from moray.errors import DataError, UnreachableError

FINGERPRINT = "drafter-hash"


class EngineBackend(Backend):
    """An engine that is stepped while a device waits."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writers: dict[int, tuple[ServerSession, ReplyWriter]] = {}
        self._numbers: dict[str, int] = {}
        self.notes: list[str] = []
        """What the server told for statistics."""

    def open(self, session: ServerSession, message: Open, codec: CodecName) -> None:
        number = self.engine.submit_paced(message.request, client_memory_of(message))
        self._numbers[session.name] = number
        self._writers[number] = session, ReplyWriter(message.request, codec)

    def offer(self, session: ServerSession, verify: Verify) -> None:
        target = self.engine.target
        self.engine.offer(self._numbers[session.name], offer_of(verify, target.spec.vocab_size, target.device))

    def cancel(self, session: ServerSession) -> None:
        number = self._numbers.pop(session.name, None)
        if number is not None:
            self._writers.pop(number, None)
            self.engine.cancel(number)

    def note_resumed(self) -> None:
        self.notes.append("resumed")

    def note_refused(self, code: RefusalCode) -> None:
        self.notes.append(code)

    def step(self) -> None:
        """Run the engine once, if it has something to do."""
        if self.engine.is_busy:
            for update in self.engine.step():
                if update.number in self._writers:
                    session, writer = self._writers[update.number]
                    session.add(writer.write(update))


class LocalServer:
    """A server that may be restarted; `cut` decides after which event a connection breaks."""

    def __init__(self, make_engine: Callable[[], Engine], drafters: dict[str, str], text: str = "text") -> None:
        self._make_engine = make_engine
        self._served = (text, drafters)
        self.links: list[LocalLink] = []
        self.frames: list[str | bytes] = []
        """Everything that has crossed."""
        self.cut: Callable[[str], bool] = lambda event: False
        """cut("send" | "sent" | "receive"): whether the connection breaks before a message is sent, after it was
        handled, or when a reply was due."""
        self.is_fast = False
        """Whether a draft is verified before the next one can arrive."""
        self.is_reachable: Callable[[], bool] = lambda: True
        self.restart()

    def restart(self) -> None:
        """Lose all sessions, as a new process would."""
        engine = self._make_engine()
        text, drafters = self._served
        self.backend = EngineBackend(engine)
        served = Served(engine.target.spec.fingerprint, text, drafters)
        limits = Limits(engine.max_model_len, 33)
        self.server = EdgeServer(served, limits, self.backend)
        for link in self.links:
            link.is_broken = True
        self.links.clear()

    def dial(self) -> Link:
        if not self.is_reachable():
            raise UnreachableError("no route to the server")
        link = LocalLink(self)
        self.links.append(link)
        return link


class LocalLink(Link):
    """One connection."""

    def __init__(self, server: LocalServer, owner: str = "0") -> None:
        self._server = server
        self._inbox: deque[bytes] = deque()
        self._connection: ServerConnection = server.server.connect(owner, self._deliver)
        self.is_broken = False
        self.silent = 0.0

    def send(self, text: str) -> None:
        self._check("send")
        self._server.frames.append(text)
        try:
            self._connection.receive(text)
        except DataError as error:  # what the engine refuses
            self._inbox.append(RefusedError("bad_message", str(error)).frame)
        while self._server.is_fast and self._server.backend.engine.is_busy:
            self._server.backend.step()
        self._check("sent")

    def receive(self, seconds: float) -> bytes | None:
        if self.is_broken and not self._inbox:
            raise UnreachableError("the connection is broken")
        if not self._inbox and seconds:
            self._server.backend.step()
        if not self._inbox:
            if self._connection.is_closed:
                raise UnreachableError("the server has closed the connection")
            return None
        self._check("receive")
        return self._inbox.popleft()

    @property
    def silent_seconds(self) -> float:
        return self.silent

    def close(self) -> None:
        self._connection.lost()

    def _deliver(self, frame: bytes) -> None:
        self._server.frames.append(frame)
        self._inbox.append(frame)

    def _check(self, event: str) -> None:
        if self.is_broken or self._server.cut(event):
            self.is_broken = True
            self._inbox.clear()
            self._connection.lost()
            raise UnreachableError(f"cut at {event}")
