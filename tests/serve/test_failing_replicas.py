"""Parts that fail: a target whose engine has ended does not live on, and a lost lease is not asked for where it was."""

import asyncio
import os

import pytest

from moray.config import validate
from moray.decoding.engine_config import EngineConfig
from moray.decoding.request import Request
from moray.errors import ConfigError
from moray.targets.spec import TargetConfig
from serve.config import ServeConfig
from serve.engine_thread import EngineFailedError
from serve.leases import LeasedPlaces
from serve.target import TargetReplica

SECRET = "squirrel"


def test_a_replica_whose_engine_has_failed_ends_once_its_callers_know(monkeypatch, caplog, chat_target):
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)

    async def run() -> None:
        replica = TargetReplica(
            ServeConfig(target=TargetConfig(model=str(chat_target), device="cpu")), ends_process=True
        )
        replica._engine.step = lambda: (_ for _ in ()).throw(ValueError(SECRET))
        with pytest.raises(EngineFailedError, match="ValueError") as told:
            async for _ in replica.generate(Request(prompt=(1, 2), max_new_tokens=4)):
                pass
        assert SECRET not in str(told.value)
        assert not exits
        await asyncio.sleep(0.5)

    asyncio.run(run())
    assert exits == [1]
    assert "the engine has failed: ValueError" in caplog.text
    assert SECRET not in caplog.text


def test_a_lost_place_is_looked_for_under_another_name():
    """Serve's router would lead the old one back to the replica that was given up."""
    names: list[str] = []

    class Lease:
        async def __aiter__(self):
            yield f"place {len(names)}"
            await asyncio.Event().wait()

        def cancel(self) -> None:
            pass

    class Drafters:
        lease = type("", (), {"remote": staticmethod(lambda session: Lease())})

        def options(self, *, stream: bool, session_id: str) -> "Drafters":
            names.append(session_id)
            return self

    async def run() -> None:
        places = LeasedPlaces(Drafters())
        places.start()
        places.open("a")
        for number in (1, 2, 3):
            while places.find("a") != f"place {number}":
                await asyncio.sleep(0.01)
            places.lose("a")
        places.close("a")
        await asyncio.sleep(0.01)
        assert places.num_leases == 0

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"capacity": 100_000}, "engine.capacity is 100000"),
        ({"kv_tokens": 64, "tree": {"type": "chain", "depth": 64}}, "engine.kv_tokens 64 less a tree of 65 nodes"),
    ],
)
def test_limits_that_do_not_fit_each_other_are_refused(chat_target, engine, message):
    values = {
        "target": {"model": str(chat_target), "device": "cpu"},
        "drafters": {"lookup": {"type": "ngram"}},
        "placement": "in_process",
        "engine": {"kv_tokens": 512} | engine,
    }
    with pytest.raises(ConfigError, match=message):
        TargetReplica(validate(ServeConfig, values))


def test_drafters_need_room_for_no_more_than_the_engine_does():
    assert EngineConfig(kv_tokens=4096).most_positions(131_072) == 4096
    assert EngineConfig(kv_tokens=4096, capacity=256).most_positions(131_072) == 256
    assert EngineConfig(kv_tokens=4096).most_positions(512) == 512
