"""The HTTP interface over a real engine in this process: no Ray cluster, but real sockets and real clients."""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from openai import OpenAI

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request, RequestOutput
from moray.edge.messages import Verify
from moray.targets.spec import TargetConfig
from serve.api.routes import build_api
from serve.config import ApiConfig, EdgeEndpointConfig, ServeConfig
from serve.gateway import Gateway
from serve.metrics.exporters import Exporters
from serve.metrics.sink import Sink
from serve.target import TargetDescription, TargetReplica

MODEL = "tiny"


class _Stream:
    """What a call of a deployment's generator returns."""

    def __init__(self, updates: AsyncIterator[Any]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._follow(updates))

    async def _follow(self, updates: AsyncIterator[Any]) -> None:
        try:
            async for update in updates:
                self._queue.put_nowait(update)
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            self._queue.put_nowait(error)
        finally:
            self._queue.put_nowait(StopAsyncIteration())
            await updates.aclose()

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> Any:
        update = await self._queue.get()
        if isinstance(update, Exception):
            raise update
        return update

    def cancel(self) -> None:
        self._task.cancel()


class LocalTargets:
    """Stands in for the handle of the target deployment: one replica, in this process."""

    def __init__(self, replica: TargetReplica) -> None:
        self.replica = replica
        self.is_ready = True
        self.failure: Exception | None = None
        """Raised instead of answering."""
        self.describe = self._Method(self._describe)
        self.generate = self._Method(self._generate)
        self.edge = self._Method(self._edge)
        self.offer = self._Method(self._offer)

    class _Method:
        def __init__(self, call: Any) -> None:
            self.remote = call

    def options(self, *, stream: bool, session_id: str, _by_reference: bool) -> "LocalTargets":
        assert not _by_reference, "errors come as they were raised"
        assert uuid.UUID(session_id)
        return self

    async def _describe(self) -> TargetDescription:
        if not self.is_ready:
            raise RuntimeError("no replica")
        return await self.replica.describe()

    def _generate(self, request: Request, is_resumed: bool) -> _Stream:
        return _Stream(self._failing() if self.failure else self.replica.generate(request, is_resumed))

    def _edge(self, *arguments: Any) -> _Stream:
        return _Stream(self._failing() if self.failure else self.replica.edge(*arguments))

    async def _offer(self, session: str, verify: Verify) -> None:
        await self.replica.offer(session, verify)

    async def _failing(self) -> AsyncIterator[RequestOutput]:
        assert self.failure is not None
        raise self.failure
        yield


class Served:
    """A running interface, and what is behind it."""

    def __init__(
        self,
        config: ServeConfig,
        exporters: Exporters | None = None,
        tls: tuple[Path, Path] | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.config = config
        self.replica = TargetReplica(config)
        self.targets = LocalTargets(self.replica)
        self.gateway = Gateway(config, self.targets, sink, exporters)
        # Told to leave open connections alone when the test ends.
        server = uvicorn.Config(
            build_api(self.gateway),
            host="127.0.0.1",
            port=0,
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="off",
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
        )
        self._server = uvicorn.Server(server)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def engine(self) -> Engine:
        return self.replica._engine

    @property
    def num_held(self) -> int:
        return self.engine.num_running + self.engine.num_waiting

    @property
    def num_open(self) -> int:
        thread = self.replica._thread
        return 0 if thread is None else thread.num_open

    @property
    def address(self) -> tuple[str, int]:
        return self._server.servers[0].sockets[0].getsockname()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def wait_until_idle(self, seconds: float) -> float:
        """Wait until nothing runs; returns the seconds that it took."""
        begin = time.monotonic()
        while self.num_held or self.num_open:
            assert time.monotonic() - begin < seconds, (self.num_held, self.num_open)
            time.sleep(0.005)
        return time.monotonic() - begin

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20)
        if self.replica._thread is not None:
            self.replica._thread.close()


@contextmanager
def served(
    target: Path,
    max_waiting: int = 64,
    max_num_seqs: int = 8,
    exporters: Exporters | None = None,
    template: str | None = None,
    drafters: Mapping[str, Any] | None = None,
    edge: EdgeEndpointConfig | None = None,
    tls: tuple[Path, Path] | None = None,
    *,
    sink: Sink | None = None,
    tensor_parallel: int = 1,
    engine: Mapping[str, Any] | None = None,
    **api: Any,
) -> Iterator[Served]:
    """Serve a target on a free port; `tls` names the files of a certificate and its key."""
    config = ServeConfig(
        target=TargetConfig(model=str(target), device="cpu", template=template, tensor_parallel=tensor_parallel),
        engine=EngineConfig(max_num_seqs=max_num_seqs, kv_cache_tokens=4096, **(engine or {})),
        max_waiting=max_waiting,
        drafters=drafters or {},
        placement="in_process",
        edge=edge,
        api=ApiConfig(**{"model_name": MODEL, **api}),
    )
    running = Served(config, exporters, tls, sink)
    running.start()
    try:
        yield running
    finally:
        running.close()
