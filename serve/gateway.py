"""The gateway: text and HTTP in front of the target replicas, and what is done when one of them dies.

Tokens are what crosses to the targets, so an answer that a replica did not finish is taken up by another from its
prompt and the tokens so far: the same text goes on, for randomness is a function of seed and position.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from moray.decoding.request import Request, RequestOutput
from moray.errors import DataError
from moray.text import ChatTokenizer
from serve.api.errors import ApiError
from serve.calls import end_call
from serve.config import ServeConfig
from serve.engine_thread import Admission, EngineFailedError
from serve.metrics import series
from serve.metrics.exporters import Exporters, NoExporters
from serve.metrics.latencies import watched
from serve.metrics.sink import Nowhere, Sink
from serve.metrics.statuses import StatusCounter
from serve.single_flight_cache import SingleFlightCache

_LOGGER = logging.getLogger("ray.serve")
_RETRY_AFTER = 1
"""Seconds that a client is asked to wait when all places are taken."""
_MAX_REFUSALS = 2
"""Replicas that a request asks for a place: Serve looks at two of them, and a third may have room."""
_FULL = 0.1
"""Seconds for which new requests are refused unasked after one has found no place: asking costs the targets more."""
_FRESH = 1.0
"""Seconds for which targets are taken to be there, or not to be, and metrics to be the latest."""
_READY_SECONDS = 3.0
"""In which a target has to say that it is there: who asks waits no longer for one that is starting."""
_PLACE_SECONDS = 60.0
"""In which a target has to take a request in, or to refuse it: there may be none, and one may be long in starting."""
_EXPORTED_SECONDS = 5.0
"""In which metrics have to be gathered."""
_PAUSE = 0.5
"""Seconds before an answer that cannot be taken up again for the moment is tried once more."""
_MAX_RESUMED_REFUSALS = 120
"""Of an answer that has begun, for its client was promised all of it: after a minute it ends with an error."""


class Gateway:
    """One replica of the HTTP interface."""

    def __init__(
        self, config: ServeConfig, targets: Any, sink: Sink | None = None, exporters: Exporters | None = None
    ) -> None:
        """
        Args:
            config: of the application.
            targets: handle of the target deployment, or what can be called as one.
            sink: of metrics.
            exporters: of what all replicas have given to their sinks.
        """
        if config.engine.synthetic.is_on:
            _LOGGER.warning(config.engine.synthetic.notice)
        self.config = config
        self.tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
        self._targets = targets
        self._sink = sink or Nowhere()
        self._exporters = exporters or NoExporters()
        self._described = SingleFlightCache(self._describe, _FRESH, _READY_SECONDS)
        self._exported = SingleFlightCache(self._exporters.read, _FRESH, _EXPORTED_SECONDS)
        self._description: dict[str, Any] | None = None
        self._full_until = float("-inf")

    def __serve_build_asgi_app__(self) -> Any:
        from serve.api.routes import build_api

        return StatusCounter(build_api(self), self._sink)

    async def describe(self) -> dict[str, Any]:
        """What the targets can do; they are asked once.

        Raises:
            ApiError: 503 while there is none.
        """
        if self._description is None:
            await self.check()
        assert self._description is not None
        return self._description

    async def check(self) -> None:
        """Whether there are targets now; they are asked about once a second, however often this is called.

        Raises:
            ApiError: 503 while there is none.
        """
        try:
            self._description = await self._described.get()
        except Exception as error:
            raise _not_ready() from error

    async def _describe(self) -> dict[str, Any]:
        return await self._targets.describe.remote()

    async def metrics(self) -> str:
        """What all replicas have published, for Prometheus; gathered once a second, however often this is called.

        Raises:
            ApiError: 503 while nobody exports it.
        """
        try:
            return await self._exported.get()
        except (ConnectionError, TimeoutError) as error:
            raise ApiError(503, f"metrics cannot be had: {error or 'too slow'}", retry_after=_RETRY_AFTER) from error

    def refuse_while_full(self) -> None:
        """Called before anything is done for a new request.

        Raises:
            ApiError: 429 where another has just found that all places are taken.
        """
        if time.monotonic() < self._full_until:
            self._sink.add(series.REQUESTS, 1, "refused")
            raise _overloaded()

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        """Answer one sequence, on as many replicas as it takes.

        Raises:
            ApiError: 400 for what the engine refuses, 429 where all places are taken, 503 where replicas keep dying,
                none takes the request in, or none has room to go on with it for a minute.
        """
        return watched(self._generate(request), self._sink)

    async def _generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        from ray.serve.exceptions import RayServeException

        tokens: list[int] = []
        failures = engine_failures = refusals = 0
        is_resumed = False
        while True:
            rest = request.model_copy(update={"generated": tuple(tokens)})
            stream = self._call(rest, is_resumed)
            try:
                if not await _is_admitted(stream):
                    refusals += 1
                    await self._refused(refusals, is_resumed)
                    continue
                is_resumed, refusals = True, 0  # from now on
                async for update in stream:
                    tokens += update.tokens
                    failures = engine_failures = 0
                    yield update
                    if update.finish_reason is not None:
                        return
                raise RayServeException("a target replica ended a stream before its answer")
            except Exception as error:
                if isinstance(error, TimeoutError) and not is_resumed:
                    raise _not_ready() from error
                if isinstance(error, DataError):
                    raise ApiError(400, str(error)) from None
                if not _is_loss(error):
                    raise
                failures += 1
                engine_failures += isinstance(error, EngineFailedError)
                # What has ended two engines, without a token in between, may be this very request.
                if failures > self.config.api.num_retries or engine_failures > 1:
                    raise ApiError(503, "target replicas keep failing: try again later", retry_after=5) from error
                self._sink.add(series.RETRIES, 1)
                _LOGGER.warning("no target replica goes on after %d tokens; another is asked", len(tokens))
                await asyncio.sleep(min(0.1 * 2**failures, 2.0))
            finally:
                end_call(stream)

    async def _refused(self, count: int, is_resumed: bool) -> None:
        """Wait until an answer may ask for a place again; it has been refused so often."""
        if is_resumed:  # its client was promised an answer; only Serve's own queue can be full
            if count == _MAX_RESUMED_REFUSALS:
                raise ApiError(503, "no target replica has room to go on with the answer", retry_after=5)
            await asyncio.sleep(_PAUSE)
        elif count == _MAX_REFUSALS:
            self._full_until = time.monotonic() + _FULL
            raise _overloaded()

    def _call(self, request: Request, is_resumed: bool) -> Any:
        """One replica's stream. Not by Ray's objects but over gRPC: an update costs a fraction, and the call ends with
        the connection, so that nothing goes on for a gateway that was killed."""
        targets = self._targets.options(stream=True, session_id=uuid.uuid4().hex, _by_reference=False)
        return targets.generate.remote(request, is_resumed)


async def _is_admitted(stream: Any) -> bool:
    """Whether a replica has a place for a call; else it, or Serve's queue in front of all, is full.

    Raises:
        TimeoutError: nobody has said so.
        RayServeException: the replica has ended.
    """
    from ray.serve.exceptions import BackPressureError, RayServeException

    try:
        admission = await asyncio.wait_for(anext(stream, None), _PLACE_SECONDS)
    except BackPressureError:
        return False
    except RuntimeError as error:  # Serve's own word where a connection ends before anything has come
        raise RayServeException("a target replica was lost before it began") from error
    if admission is None:
        raise RayServeException("a target replica ended a stream before it began")
    return admission is Admission.ADMITTED


def _is_loss(error: Exception) -> bool:
    """Whether a replica, its engine or the connection to it has ended, or none was there in time: not a defect that
    another would meet as well."""
    from grpc import StatusCode
    from grpc.aio import AioRpcError
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    if isinstance(error, AioRpcError):
        return error.code() in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL)
    return isinstance(error, RayError | RayServeException | EngineFailedError | TimeoutError)


def _not_ready() -> ApiError:
    return ApiError(503, "no target replica is ready: try again", retry_after=_RETRY_AFTER)


def _overloaded() -> ApiError:
    return ApiError(429, "all places are taken", code="queue_full", retry_after=_RETRY_AFTER)
