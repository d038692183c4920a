"""Parts that fail: a target whose engine has ended does not live on, and a lost lease is not asked for where it was."""

import asyncio
import os
import secrets
from pathlib import Path

import pytest

from moray.config import validate
from moray.decoding.engine_config import EngineConfig
from moray.decoding.remote.channel import SocketChannel
from moray.decoding.remote.messages import DraftRequest, Entry, pack
from moray.decoding.request import Request
from moray.errors import ConfigError
from moray.targets.spec import TargetConfig
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
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
        lease = type("", (), {"remote": staticmethod(lambda session, holder: Lease())})

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


def test_a_target_that_is_gone_holds_no_places(chat_target):
    """Ray does not end its calls; its connections end with it."""

    async def run() -> None:
        replica = drafter_of(chat_target)
        gone, other = secrets.token_hex(16), secrets.token_hex(16)
        leases = [replica.lease(name, holder) for name, holder in (("a", gone), ("b", gone), ("c", other))]
        places = [await anext(lease) for lease in leases]
        ends = [asyncio.create_task(anext(lease, "over")) for lease in leases]
        channels = [await asyncio.to_thread(SocketChannel, place) for place in places]
        for channel in channels:  # the secret is told before a frame is answered
            channel.send(pack(DraftRequest(number=1, entries=())))
            assert await asyncio.to_thread(channel.receive, 10.0)
        assert await replica.describe() == {"num_sessions": 0, "num_leases": 3}
        channels[0].close()
        await asyncio.sleep(0.2)
        assert not any(end.done() for end in ends), "there is another connection"
        channels[1].close()
        assert await asyncio.wait_for(asyncio.gather(*ends[:2]), 10) == ["over", "over"]
        assert await replica.describe() == {"num_sessions": 0, "num_leases": 1}
        ends[2].cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    asyncio.run(run())


def test_a_place_that_nobody_uses_ends(chat_target):
    """Whoever held it may be gone with its machine, or never have come."""

    async def run() -> None:
        replica = drafter_of(chat_target, session_idle_seconds=0.3)
        used, unused = replica.lease("a", "00" * 16), replica.lease("b", "00" * 16)
        places = [await anext(lease) for lease in (used, unused)]
        assert places[0] == places[1]
        end = asyncio.create_task(anext(used, "over"))
        over = asyncio.create_task(anext(unused, "over"))
        known = 0
        while not over.done():
            entry = Entry(session="a", drafter="lookup", known=known, tokens=(1,), num_kept=0)
            (answer,) = replica.host.handle(DraftRequest(number=1, entries=(entry,)), {}).trees
            known += 1
            assert answer.known == known
            await asyncio.sleep(0.02)
        assert not end.done()
        assert await replica.describe() == {"num_sessions": 1, "num_leases": 1}
        assert await asyncio.wait_for(end, 10) == "over"
        assert await replica.describe() == {"num_sessions": 0, "num_leases": 0}

    asyncio.run(run())


def drafter_of(folder: Path, **settings: object) -> DrafterReplica:
    """A drafter replica without Ray."""
    values = {
        "target": {"model": str(folder), "device": "cpu"},
        "drafters": {"lookup": {"type": "ngram"}},
        **settings,
    }
    return DrafterReplica(validate(ServeConfig, values), "127.0.0.1")


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
