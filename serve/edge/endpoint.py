"""The endpoint for devices that run the drafter: WebSockets here, the engine in a target replica.

A session lives in the gateway replica that opened it and holds one streamed call to one target replica. If either is
lost, the device opens its session again, with all tokens that it has verified.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from moray.decoding.sampling.stop import Decode
from moray.edge.messages import SUBPROTOCOL, CodecName, Open, RefusalCode, Verify
from moray.edge.server.replies import Reply
from moray.edge.server.server import Backend, EdgeServer, Limits, RefusedError
from moray.edge.server.session import ServerSession
from moray.errors import DataError
from serve.api.documents import EdgeSession
from serve.api.failures import describe
from serve.calls import end_call
from serve.config import EdgeEndpointConfig
from serve.edge.view import SessionView
from serve.engine_thread import Admission
from serve.metrics import series
from serve.metrics.sink import Sink
from serve.target import TargetDescription

_LOGGER = logging.getLogger("ray.serve")
_MAX_QUEUED_BYTES = 8 << 20
"""Bytes that may wait for a slow device before its target replica has to wait."""
_RETRY_MS = 1000


class _Outbox:
    """Frames that wait to be sent to one device."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, frame: bytes | None) -> None:
        """Queue a frame; None after the last one."""
        self._num_bytes += len(frame or b"")
        if self._num_bytes > _MAX_QUEUED_BYTES:
            self._has_room.clear()
        self._frames.put_nowait(frame)

    async def get(self) -> bytes | None:
        """The next frame."""
        frame = await self._frames.get()
        self._num_bytes -= len(frame or b"")
        if self._num_bytes <= _MAX_QUEUED_BYTES:
            self._has_room.set()
        return frame

    async def wait_for_room(self) -> None:
        """Wait until the device has taken enough."""
        await self._has_room.wait()


class EdgeGateway(Backend):
    """The sessions of one gateway replica."""

    def __init__(
        self, config: EdgeEndpointConfig, targets: Any, decode: Decode, sink: Sink, *, log_prompts: bool = False
    ) -> None:
        """
        Args:
            config: of the endpoint.
            targets: handle of the target deployment.
            decode: the tokenizer's.
            sink: of metrics.
            log_prompts: whether texts may appear in the log.
        """
        self._config = config
        self._sink = sink
        self._decode = decode
        self._views: OrderedDict[str, SessionView] = OrderedDict()
        """The latest sessions, for `describe`; an ended one is kept until newer ones take its place."""
        self._targets = targets
        self._log_prompts = log_prompts
        self._server: EdgeServer | None = None
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._offers: dict[str, asyncio.Queue[Verify]] = {}
        self._outboxes: dict[Callable[[bytes], None], _Outbox] = {}
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def num_sessions(self) -> int:
        """Sessions whose answers have not ended."""
        return 0 if self._server is None else self._server.num_running

    def describe(self, who: Any) -> list[EdgeSession]:
        """The latest sessions of a key or address, the last one first."""
        return [view.describe(self._decode) for view in reversed(self._views.values()) if view.owner == str(who)]

    async def serve(
        self, socket: WebSocket, who: Any, description: TargetDescription, wait: Callable[[], float]
    ) -> None:
        """Serve one connection until it ends.

        Args:
            socket: not accepted yet.
            who: the key or address that the connection belongs to.
            description: of the targets.
            wait: counts a message and returns the seconds to wait before it may be handled.
        """
        if SUBPROTOCOL not in socket.scope.get("subprotocols", ()):
            await socket.close(1002, f"subprotocol {SUBPROTOCOL} is needed")
            return
        server = self._started(description)
        await socket.accept(subprotocol=SUBPROTOCOL)
        outbox = _Outbox()
        send = outbox.put
        self._outboxes[send] = outbox
        connection = server.connect(str(who), send)
        sending = asyncio.create_task(self._send_all(socket, outbox))
        try:
            while not connection.is_closed:
                try:
                    text = await asyncio.wait_for(socket.receive_text(), self._config.idle_seconds)
                except TimeoutError:
                    if connection.is_idle:
                        break
                    continue
                except (WebSocketDisconnect, KeyError):  # gone, or it sent binary where text is needed
                    break
                self._sink.add(series.EDGE_BYTES, len(text), "received")
                await asyncio.sleep(wait())
                connection.receive(text)
        finally:
            connection.lost()
            outbox.put(None)
            with suppress(Exception):
                await asyncio.wait_for(sending, 5)
            sending.cancel()
            del self._outboxes[send]
            if socket.client_state is WebSocketState.CONNECTED and socket.application_state is WebSocketState.CONNECTED:
                with suppress(RuntimeError):
                    await socket.close()

    def _started(self, description: TargetDescription) -> EdgeServer:
        if self._server is None:
            assert description.edge is not None
            config = self._config
            limits = Limits(
                max_model_len=description.max_model_len,
                max_nodes=1 + config.max_nodes,
                max_in_flight=config.max_in_flight,
                max_sessions=config.max_sessions,
                max_sessions_per_key=config.max_sessions_per_key,
                idle_seconds=config.idle_seconds,
            )
            self._server = EdgeServer(description.edge, limits, self)
            self._sweeping = asyncio.create_task(self._sweep(self._server))
        return self._server

    async def _sweep(self, server: EdgeServer) -> None:
        while True:
            await asyncio.sleep(self._config.idle_seconds / 4)
            server.sweep()

    async def _send_all(self, socket: WebSocket, outbox: _Outbox) -> None:
        while (frame := await outbox.get()) is not None:
            self._sink.add(series.EDGE_BYTES, len(frame), "sent")
            await socket.send_bytes(frame)

    def note_resumed(self) -> None:
        self._sink.add(series.EDGE_RESUMED, 1)

    def note_refused(self, code: RefusalCode) -> None:
        self._sink.add(series.EDGE_REFUSED, 1, code)

    # --- Sequences ---

    def open(self, session: ServerSession, message: Open, codec: CodecName) -> None:
        self._views[session.name] = SessionView(session.name, session.owner, message.request)
        while len(self._views) > 2 * self._config.max_sessions:
            self._views.popitem(last=False)
        self._offers[session.name] = asyncio.Queue()
        self._streams[session.name] = asyncio.create_task(self._follow(session, message, codec))
        self._sink.set(series.EDGE_SESSIONS, self.num_sessions)

    def offer(self, session: ServerSession, verify: Verify) -> None:
        self._offers[session.name].put_nowait(verify)
        self._sink.add(series.EDGE_DRAFTS, 1)
        if session.name in self._views:
            self._views[session.name].draft(verify)

    def cancel(self, session: ServerSession) -> None:
        stream = self._streams.pop(session.name, None)
        self._offers.pop(session.name, None)
        if stream is not None:
            stream.cancel()

    async def _follow(self, session: ServerSession, message: Open, codec: CodecName) -> None:
        """Pass on what the target replica has for a session, and what its device offers."""
        server = self._server
        router_session = (
            uuid.uuid4().hex
        )  # new each time a session is opened, so that the router may choose another replica
        assert server is not None
        targets = self._targets.options(stream=True, session_id=router_session, _by_reference=False)
        stream = targets.edge.remote(session.name, message, codec)
        offering: asyncio.Task[None] | None = None
        try:
            async for event in stream:
                if event is Admission.REFUSED:
                    raise RefusedError("full", "the server is at capacity: try again later", _RETRY_MS)
                if event is Admission.ADMITTED:
                    offering = asyncio.create_task(self._pass_on(session, router_session))
                    continue
                session.add(event)
                self._count(event)
                if session.name in self._views:
                    self._views[session.name].verify(event)
                session.heard_at = server.clock()
                outbox = self._outboxes.get(session.send) if session.send is not None else None
                if outbox is not None:
                    await outbox.wait_for_room()
                if event.is_finished:
                    return
            raise RefusedError("session", "the target replica ended the sequence: open it again")
        except RefusedError as error:
            server.fail(session, error)
        except DataError as error:
            server.fail(session, RefusedError("bad_message", str(error)))
        except Exception as error:  # noqa: BLE001 - a replica was lost, or its engine failed
            _LOGGER.warning("an edge session has lost its target: %s", describe(error, self._log_prompts))
            server.fail(session, RefusedError("session", "the target replica was lost: open the session again"))
        finally:
            end_call(stream)
            if offering is not None:
                offering.cancel()
            self._sink.set(series.EDGE_SESSIONS, self.num_sessions)

    def _count(self, reply: Reply) -> None:
        if reply.num_accepted:
            self._sink.add(series.EDGE_TOKENS, reply.num_accepted, "draft")
        if len(reply.tokens) > reply.num_accepted:
            self._sink.add(series.EDGE_TOKENS, len(reply.tokens) - reply.num_accepted, "target")

    async def _pass_on(self, session: ServerSession, router_session: str) -> None:
        """Send the drafts of a session to its target replica, in order."""
        server, offers = self._server, self._offers[session.name]
        assert server is not None
        targets = self._targets.options(session_id=router_session, stream=False, _by_reference=False)
        try:
            while True:
                await targets.offer.remote(session.name, await offers.get())
        except Exception as error:  # noqa: BLE001 - a replica was lost
            _LOGGER.warning("an edge session has lost its target: %s", describe(error, self._log_prompts))
            server.fail(session, RefusedError("session", "the target replica was lost: open the session again"))
