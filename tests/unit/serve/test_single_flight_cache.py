"""One call computes the value for all callers, in a context of its own."""

import asyncio
from contextvars import ContextVar

import pytest

from serve.single_flight_cache import SingleFlightCache

ASKER = ContextVar("ASKER", default="nobody")


class Finder:
    """Finds out who asks, after a while."""

    def __init__(self, seconds: float = 0.05, error: BaseException | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.num_calls = 0

    async def __call__(self) -> str:
        self.num_calls += 1
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return f"{self.num_calls}, for {ASKER.get()}"


def test_one_finds_out_for_all_until_it_is_old():
    async def run() -> None:
        finder = Finder()
        cache = SingleFlightCache(finder, 0.3, 10.0)
        assert await asyncio.gather(*(cache.get() for _ in range(5))) == ["1, for nobody"] * 5
        assert await cache.get() == "1, for nobody"
        await asyncio.sleep(0.4)
        assert await cache.get() == "2, for nobody"

    asyncio.run(run())


def test_it_goes_on_when_the_first_to_ask_leaves_and_is_not_done_in_their_name():
    async def run() -> None:
        finder = Finder()
        cache = SingleFlightCache(finder, 10.0, 10.0)

        async def ask() -> str:
            ASKER.set("the first")
            return await cache.get()

        first = asyncio.create_task(ask())
        await asyncio.sleep(0.01)
        second = asyncio.create_task(cache.get())
        await asyncio.sleep(0.01)
        first.cancel()
        assert await second == "1, for nobody"
        assert first.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("error", [ConnectionError("gone"), asyncio.CancelledError()], ids=lambda e: type(e).__name__)
def test_what_went_wrong_is_remembered_as_long(error):
    async def run() -> None:
        finder = Finder(error=error)
        cache = SingleFlightCache(finder, 10.0, 10.0)
        for _ in range(3):
            with pytest.raises(ConnectionError if isinstance(error, ConnectionError) else TimeoutError):
                await cache.get()
        assert finder.num_calls == 1

    asyncio.run(run())


def test_nobody_waits_for_ever():
    async def run() -> None:
        cache = SingleFlightCache(Finder(seconds=60), 10.0, 0.05)
        with pytest.raises(TimeoutError):
            await cache.get()

    asyncio.run(run())
