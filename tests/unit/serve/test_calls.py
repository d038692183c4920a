"""Calls are ended whatever has become of them."""

import asyncio

import pytest

from serve.calls import end_call


class Result:
    """What a replica that was chosen gives."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Call:
    """As Serve's own: of a replica that was chosen and not waited for yet it knows nothing."""

    def __init__(self, choosing: asyncio.Future, error: Exception | None = None) -> None:
        self._replica_result_future = choosing
        self._error = error

    def cancel(self) -> None:
        self._replica_result_future.cancel()
        if self._error is not None:
            raise self._error


def test_a_replica_that_was_just_chosen_is_told():
    async def run() -> Result:
        result = Result()
        choosing = asyncio.get_running_loop().create_future()
        choosing.set_result(result)
        end_call(Call(choosing))
        await asyncio.sleep(0)
        return result

    assert asyncio.run(run()).is_cancelled


@pytest.mark.parametrize("state", ["waiting", "failed", "cancelled"])
def test_nothing_is_raised_where_none_was(state):
    async def run() -> None:
        choosing = asyncio.get_running_loop().create_future()
        if state == "failed":
            choosing.set_exception(ConnectionError("no replica"))
        elif state == "cancelled":
            choosing.cancel()
        end_call(Call(choosing, ConnectionError("no replica")))
        await asyncio.sleep(0)
        assert choosing.done()

    asyncio.run(run())


def test_calls_without_that_are_cancelled():
    call = Result()
    end_call(call)
    assert call.is_cancelled
