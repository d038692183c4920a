"""Targets that have no place left: an answer that was begun goes on all the same, and a new request looks twice."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from served_api import LocalTargets, _Stream

from moray.decoding.engine.config import EngineConfig
from moray.decoding.request import Request, RequestOutput
from moray.targets.spec import TargetConfig
from serve import gateway as gateway_module
from serve.api.errors import ApiError
from serve.config import ApiConfig, ServeConfig
from serve.engine_thread import Admission, EngineFailedError
from serve.gateway import Gateway
from serve.target import TargetReplica

REQUEST = Request(prompt=(5, 6, 7), max_new_tokens=12)


class Targets(LocalTargets):
    """The handle of several replicas, the first of which is full; the calls go where a test says."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(TargetReplica(config))
        self.free = TargetReplica(config)
        self.calls: list[Any] = []
        self.num_calls = 0

    def _generate(self, request: Request, is_resumed: bool) -> _Stream:
        self.num_calls += 1
        call = self.calls.pop(0) if self.calls else self.replica.generate
        return _Stream(call(request, is_resumed))


def dies_after(updates: list[RequestOutput], error: Exception) -> Any:
    """A replica that gives so much of an answer."""

    async def generate(request: Request, is_resumed: bool) -> AsyncIterator[Any]:
        if not isinstance(error, BackPressureError):
            yield Admission.ADMITTED
        for update in updates:
            yield update
        raise error

    return generate


@pytest.fixture
def config(chat_target):
    """One sequence at a time, and no queue."""
    return ServeConfig(
        target=TargetConfig(model=str(chat_target), device="cpu"),
        engine=EngineConfig(max_num_seqs=1, kv_cache_tokens=512),
        max_waiting=0,
        api=ApiConfig(model_name="tiny"),
    )


def with_a_full_target(config, test) -> None:
    """Run `test(gateway, targets, updates)`, with what the answer is when there is room."""

    async def run() -> None:
        targets = Targets(config)
        gateway = Gateway(config, targets)
        try:
            admission, *expected = [event async for event in targets.free.generate(REQUEST)]
            assert admission is Admission.ADMITTED
            taken = targets.replica.generate(REQUEST.model_copy(update={"max_new_tokens": 100}))
            await anext(taken)
            await test(gateway, targets, expected)
            await taken.aclose()  # until here its place is taken, though the engine has long been through with it
        finally:
            for replica in (targets.replica, targets.free):
                replica.running.close()

    asyncio.run(run())


def tokens_of(updates: list[RequestOutput]) -> list[int]:
    return [token for update in updates for token in update.tokens]


DIED = RayError("the replica died")
HUNG_UP = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize(
    "loss", [DIED, HUNG_UP, EngineFailedError("the engine has failed")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("num_updates", [0, 2])
@pytest.mark.parametrize("is_queue_full", [False, True])
def test_an_answer_that_was_begun_goes_on_at_a_full_target(config, num_updates, is_queue_full, loss):
    async def test(gateway, targets, expected):
        targets.calls = [dies_after(expected[:num_updates], loss)]
        if is_queue_full:
            targets.calls.append(dies_after([], BackPressureError(num_queued_requests=1, max_queued_requests=1)))
        answer = [update async for update in gateway.generate(REQUEST)]
        assert tokens_of(answer) == tokens_of(expected)
        assert answer[-1].finish_reason == expected[-1].finish_reason
        assert targets.num_calls == 2 + is_queue_full

    with_a_full_target(config, test)


def test_an_answer_that_is_never_taken_up_again_ends(config, monkeypatch):
    monkeypatch.setattr(gateway_module, "_REFUSAL_PAUSE_SECONDS", 0.01)
    full = BackPressureError(num_queued_requests=1, max_queued_requests=1)

    async def test(gateway, targets, expected):
        targets.calls = [dies_after(expected[:2], DIED), *(dies_after([], full) for _ in range(500))]
        with pytest.raises(ApiError, match="no target replica has room to go on") as caught:
            [update async for update in gateway.generate(REQUEST)]
        assert (caught.value.status, targets.num_calls) == (503, 121)

    with_a_full_target(config, test)


def test_a_new_request_looks_for_a_place_twice(config):
    async def test(gateway, targets, expected):
        with pytest.raises(ApiError, match="the server is at capacity") as caught:
            await anext(gateway.generate(REQUEST))
        assert (caught.value.status, targets.num_calls) == (429, 2)
        targets.calls = [targets.replica.generate, targets.free.generate]
        assert tokens_of([update async for update in gateway.generate(REQUEST)]) == tokens_of(expected)
        assert targets.num_calls == 4

    with_a_full_target(config, test)


def test_those_behind_one_that_found_no_place_are_refused_unasked_for_a_moment(config, monkeypatch):
    """At many times the load it can bear, a target must not spend its time on refusals."""
    now = [50.0]
    monkeypatch.setattr(gateway_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def test(gateway, targets, expected):
        gateway.refuse_while_full()
        with pytest.raises(ApiError):
            await anext(gateway.generate(REQUEST))
        with pytest.raises(ApiError, match="the server is at capacity") as caught:
            gateway.refuse_while_full()
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        now[0] += 0.5
        gateway.refuse_while_full()
        assert targets.num_calls == 2

    with_a_full_target(config, test)


def test_where_nobody_takes_a_request_in_nothing_is_ready(config, monkeypatch):
    monkeypatch.setattr(gateway_module, "_ADMISSION_SECONDS", 1.0)

    async def waits(request: Request, is_resumed: bool) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def test(gateway, targets, expected):
        targets.calls = [waits]
        with pytest.raises(ApiError, match="no target replica is ready") as caught:
            await anext(gateway.generate(REQUEST))
        assert (caught.value.status, caught.value.retry_after, targets.num_calls) == (503, 1, 1)
        targets.calls = [dies_after(expected[:2], DIED), waits, targets.free.generate]
        answer = [update async for update in gateway.generate(REQUEST)]
        assert tokens_of(answer) == tokens_of(expected), "what was begun waits for another target"

    with_a_full_target(config, test)


@pytest.mark.parametrize(("loss", "num_calls"), [(DIED, 4), (EngineFailedError("the engine has failed"), 2)])
def test_what_may_end_engines_is_not_tried_on_all_of_them(config, monkeypatch, loss, num_calls):
    config = config.model_copy(update={"api": config.api.model_copy(update={"num_retries": 3})})

    async def test(gateway, targets, expected):
        targets.calls = [dies_after([], loss) for _ in range(9)]
        with pytest.raises(ApiError, match="keep failing") as caught:
            await anext(gateway.generate(REQUEST))
        assert (caught.value.status, targets.num_calls) == (503, num_calls)

    with_a_full_target(config, test)


def test_who_was_not_let_in_is_not_let_in_beyond_the_limit_elsewhere(config):
    """A replica that ends before it answers has not refused: the next one is asked as for a new request."""
    resumed: list[bool] = []

    async def test(gateway, targets, expected):
        async def ends(request: Request, is_resumed: bool) -> AsyncIterator[Any]:
            raise EngineFailedError("the engine has failed")
            yield

        def watched(call: Any) -> Any:
            def generate(request: Request, is_resumed: bool) -> AsyncIterator[Any]:
                resumed.append(is_resumed)
                return call(request, is_resumed)

            return generate

        targets.calls = [watched(ends), watched(targets.free.generate)]
        assert tokens_of([update async for update in gateway.generate(REQUEST)]) == tokens_of(expected)

    with_a_full_target(config, test)
    assert resumed == [False, False]


@pytest.mark.parametrize("num_updates", [None, 0, 2])
def test_a_stream_that_ends_before_its_answer_is_taken_up_elsewhere(config, num_updates):
    async def test(gateway, targets, expected):
        async def ends(request: Request, is_resumed: bool) -> AsyncIterator[Any]:
            if num_updates is not None:
                yield Admission.ADMITTED
            for update in expected[: num_updates or 0]:
                yield update

        targets.calls = [ends, targets.free.generate]
        assert tokens_of([update async for update in gateway.generate(REQUEST)]) == tokens_of(expected)
        assert targets.num_calls == 2

    with_a_full_target(config, test)
