"""The gateway: serves HTTP, calls target replicas, and continues an answer on another replica when one is lost."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from moray.decoding.request import Request, RequestOutput
from moray.text import ChatTokenizer
from serve.api.errors import ApiError
from serve.calls import end_call
from serve.config import ServeConfig
from serve.edge.endpoint import EdgeGateway
from serve.engine_thread import Admission
from serve.metrics import series
from serve.metrics.exporters import Exporters, NoExporters
from serve.metrics.latencies import watched
from serve.metrics.sink import Nowhere, Sink
from serve.metrics.statuses import StatusCounter
from serve.resumable_answer import RETRY_AFTER_SECONDS, ResumableAnswer, not_ready, overloaded
from serve.single_flight_cache import SingleFlightCache
from serve.target import TargetDescription

_LOGGER = logging.getLogger("ray.serve")
_MAX_REFUSALS = 2
"""Number of replicas that are asked to admit a new request before it is refused."""
_MAX_REFUSALS_ONCE_ADMITTED = 120
"""The same for an answer that has begun, whose client was promised all of it: it gives up after a minute."""
_REFUSAL_PAUSE_SECONDS = 0.5
"""Pause between such attempts."""
_FULL_SECONDS = 0.1
"""Seconds for which new requests are refused without asking, once no replica has admitted one: asking would cost the
targets time."""
_FRESH = 1.0
"""Seconds for which a description of the targets, and metrics, are not asked for again."""
_READY_SECONDS = 3.0
"""Time in which a target must describe itself: a health check does not wait for one that is starting."""
_ADMISSION_SECONDS = 60.0
"""Time in which a target must admit or refuse a request; one may be starting."""
_EXPORTED_SECONDS = 5.0
"""Time in which metrics must be collected."""


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
        edge = config.edge
        self.edge = (
            None
            if edge is None
            else EdgeGateway(edge, targets, self.tokenizer.decode, self._sink, log_prompts=config.api.log_prompts)
        )
        """For devices that run the drafter."""
        self._description: TargetDescription | None = None
        self._full_until = float("-inf")

    def __serve_build_asgi_app__(self) -> Any:
        from serve.api.routes import build_api

        return StatusCounter(build_api(self), self._sink)

    async def describe(self) -> TargetDescription:
        """The target's description: context, vocabulary, drafters. It is asked for once.

        Raises:
            ApiError: 503 while no target is ready.
        """
        if self._description is None:
            await self.check()
        assert self._description is not None
        return self._description

    async def check(self) -> None:
        """Check that a target is ready; the targets are asked at most once a second.

        Raises:
            ApiError: 503 while no target is ready.
        """
        try:
            self._description = await self._described.get()
        except Exception as error:
            raise not_ready() from error

    async def _describe(self) -> TargetDescription:
        return await self._targets.describe.remote()

    async def metrics(self) -> str:
        """The metrics of all replicas, for Prometheus; they are collected at most once a second.

        Raises:
            ApiError: 503 while no exporter answers.
        """
        try:
            return await self._exported.get()
        except (ConnectionError, TimeoutError) as error:
            raise ApiError(
                503,
                f"metrics are unavailable: {error or 'Ray did not answer in time'}",
                retry_after=RETRY_AFTER_SECONDS,
            ) from error

    def refuse_while_full(self) -> None:
        """Refuse a new request before any work, if another one has just found every target full.

        Raises:
            ApiError: 429.
        """
        if time.monotonic() < self._full_until:
            self._sink.add(series.REQUESTS, 1, "refused")
            raise overloaded()

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        """Answer one sequence; if its replica is lost, another one continues it.

        Raises:
            ApiError: 400 if the engine refuses the request, 429 if every target is full, 503 if replicas keep failing,
                none admits the request in time, or none has room to continue it for a minute.
        """
        return watched(self._generate(request), self._sink)

    async def _generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        from ray.serve.exceptions import RayServeException

        answer = ResumableAnswer(request, self.config.api.num_retries)
        while True:
            stream = self._call(answer.remaining, answer.is_admitted)
            try:
                if not await _is_admitted(stream):
                    answer.num_refusals += 1
                    await self._wait_after_refusal(answer)
                    continue
                answer.admit()
                async for update in stream:
                    answer.record(update)
                    yield update
                    if update.finish_reason is not None:
                        return
                raise RayServeException("a target replica ended a stream before its answer")
            except Exception as error:
                seconds = answer.backoff(error)
                if seconds is None:
                    raise
                self._sink.add(series.RETRIES, 1)
                _LOGGER.warning("a target replica was lost after %d tokens; asking another one", len(answer.tokens))
                await asyncio.sleep(seconds)
            finally:
                end_call(stream)

    async def _wait_after_refusal(self, answer: ResumableAnswer) -> None:
        """Wait until another replica may be asked.

        Raises:
            ApiError: 429 for a new request, 503 for an admitted one that has been refused too often.
        """
        if answer.is_admitted:  # a full target still takes it in; what is full is the queue of Serve
            if answer.num_refusals == _MAX_REFUSALS_ONCE_ADMITTED:
                raise ApiError(503, "no target replica has room to go on with the answer", retry_after=5)
            await asyncio.sleep(_REFUSAL_PAUSE_SECONDS)
        elif answer.num_refusals == _MAX_REFUSALS:
            self._full_until = time.monotonic() + _FULL_SECONDS
            raise overloaded()

    def _call(self, request: Request, is_resumed: bool) -> Any:
        """One replica's stream. It runs over gRPC and not through Ray's object store: an update costs a fraction, and
        the call ends with the connection, so no replica works on for a gateway that was killed."""
        targets = self._targets.options(stream=True, session_id=uuid.uuid4().hex, _by_reference=False)
        return targets.generate.remote(request, is_resumed)


async def _is_admitted(stream: Any) -> bool:
    """Whether a replica admits a call; otherwise the replica, or Serve's queue in front of all of them, is full.

    Raises:
        TimeoutError: no replica has answered in time.
        RayServeException: the replica was lost.
    """
    from ray.serve.exceptions import BackPressureError, RayServeException

    try:
        admission = await asyncio.wait_for(anext(stream, None), _ADMISSION_SECONDS)
    except BackPressureError:
        return False
    except RuntimeError as error:  # what Serve raises when a connection ends before anything has come
        raise RayServeException("a target replica was lost before it began") from error
    if admission is None:
        raise RayServeException("a target replica ended a stream before it began")
    return admission is Admission.ADMITTED
