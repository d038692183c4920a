"""Parts that fail: a target whose engine has ended does not live on, and a lost lease is not asked for where it was."""

import asyncio
import os
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from moray.config import validate
from moray.decoding.engine.config import EngineConfig
from moray.decoding.remote.messages import DraftRequest, Entry
from moray.decoding.request import Request
from moray.errors import ConfigError
from moray.targets.spec import TargetConfig
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
from serve.engine_thread import EngineFailedError
from serve.lease_client import LeaseClient
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

        def options(self, *, stream: bool, session_id: str, _by_reference: bool) -> "Drafters":
            names.append(session_id)
            return self

    async def run() -> None:
        places = LeaseClient(Drafters())
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


def test_a_place_whose_lease_has_ended_is_looked_for_again():
    """By itself: its drafter took the sequence to be done with, or has ended without an error."""

    class Lease:
        def __init__(self, is_over: bool) -> None:
            self._is_over = is_over

        async def __aiter__(self):
            yield f"place {len(leases)}"
            if not self._is_over:
                await asyncio.Event().wait()

        def cancel(self) -> None:
            pass

    leases: list[Lease] = []

    class Drafters:
        def options(self, **_: object) -> "Drafters":
            return self

        @property
        def lease(self) -> SimpleNamespace:
            def remote(session: str) -> Lease:
                leases.append(Lease(is_over=not leases))
                return leases[-1]

            return SimpleNamespace(remote=remote)

    async def run() -> None:
        places = LeaseClient(Drafters())
        places.start()
        places.open("a")
        while places.find("a") != "place 2":
            await asyncio.sleep(0.01)
        places.close("a")

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_lease_that_ends_late_leaves_the_newer_one_its_place(chat_target):
    """Both come from the same target: it has given up the old one and asked anew."""

    async def run(replica: DrafterReplica) -> None:
        old, new = replica.lease("a"), replica.lease("a")
        await anext(old)
        await anext(new)
        await old.aclose()
        entry = Entry(session="a", drafter="twin", known=0, tokens=(1, 2), num_kept=0)
        (answer,) = replica.host.handle(DraftRequest(number=1, entries=(entry,)), {}).trees
        assert answer.known == 2
        await new.aclose()
        assert await replica.describe() == {"num_sessions": 0, "num_leases": 0}

    with drafter_of(chat_target) as replica:
        asyncio.run(run(replica))


def test_a_place_that_nobody_uses_ends(chat_target):
    """Whoever held it may be gone with its machine, or never have come."""

    async def run(replica: DrafterReplica) -> None:
        used, unused = replica.lease("a"), replica.lease("b")
        places = [await anext(lease) for lease in (used, unused)]
        assert places[0] == places[1]
        end = asyncio.create_task(anext(used, "over"))
        over = asyncio.create_task(anext(unused, "over"))
        known = 0
        while not over.done():
            entry = Entry(session="a", drafter="twin", known=known, tokens=(1,), num_kept=0)
            (answer,) = replica.host.handle(DraftRequest(number=1, entries=(entry,)), {}).trees
            known += 1
            assert answer.known == known
            await asyncio.sleep(0.02)
        assert not end.done()
        assert await replica.describe() == {"num_sessions": 1, "num_leases": 1}
        assert await asyncio.wait_for(end, 10) == "over"
        assert await replica.describe() == {"num_sessions": 0, "num_leases": 0}
        assert replica.host.stats.num_expired == 1

    with drafter_of(chat_target, session_idle_seconds=2.0) as replica:
        asyncio.run(run(replica))


def drafter_of(folder: Path, **settings: object) -> AbstractContextManager[DrafterReplica]:
    """A drafter replica without Ray."""
    values = {
        "target": {"model": str(folder), "device": "cpu"},
        "drafters": {"twin": {"type": "pretrained", "model": str(folder)}},
        **settings,
    }
    return closing(DrafterReplica(validate(ServeConfig, values), "127.0.0.1"))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"max_model_len": 100_000}, "engine.max_model_len is 100000"),
        (
            {"kv_cache_tokens": 64, "tree": {"type": "chain", "depth": 64}},
            "engine.kv_cache_tokens 64 less a tree of 65 nodes",
        ),
    ],
)
def test_limits_that_do_not_fit_each_other_are_refused(chat_target, engine, message):
    values = {
        "target": {"model": str(chat_target), "device": "cpu"},
        "drafters": {"lookup": {"type": "ngram"}},
        "placement": "in_process",
        "engine": {"kv_cache_tokens": 512} | engine,
    }
    with pytest.raises(ConfigError, match=message):
        TargetReplica(validate(ServeConfig, values))


def test_drafters_need_room_for_no_more_than_the_engine_does():
    assert EngineConfig(kv_cache_tokens=4096).max_positions_of(131_072) == 4096
    assert EngineConfig(kv_cache_tokens=4096, max_model_len=256).max_positions_of(131_072) == 256
    assert EngineConfig(kv_cache_tokens=4096).max_positions_of(512) == 512
