"""Who drafts where: drafters with weights in the pool, prompt lookup beside the target, both in one application."""

import asyncio
from types import SimpleNamespace

from moray.config import validate
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request, RequestOutput
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
from serve.target import TargetReplica


def test_prompt_lookup_needs_no_place_in_the_pool(chat_target):
    """Each would be a call that lasts as long as its sequence, for a draft of less than a millisecond."""
    values = {
        "target": {"model": str(chat_target), "device": "cpu"},
        "drafters": {"twin": {"type": "pretrained", "model": str(chat_target)}, "lookup": {"type": "ngram"}},
        "engine": {"tree": {"type": "chain", "depth": 3}},
    }
    config = validate(ServeConfig, values)
    leased: list[str] = []

    class Pool:
        def options(self, **_: object) -> SimpleNamespace:
            return SimpleNamespace(lease=SimpleNamespace(remote=leased.append))

    replica = TargetReplica(config, Pool())
    sources = {name: type(scheduler.source) for name, scheduler in replica._engine.draft_schedulers.items()}
    assert sources == {"twin": RemoteDrafts, "lookup": LocalDrafts}

    async def ask() -> int:
        asked = Request(prompt=(1, 2, 1, 2, 1), max_new_tokens=24, drafter="lookup")
        events = [event async for event in replica.generate(asked)]
        replica.running.close()
        return sum(len(event.tokens) for event in events if isinstance(event, RequestOutput))

    assert asyncio.run(ask()) == 24
    assert replica._engine.stats.num_drafts > 0
    assert not leased
    pooled = DrafterReplica(config, "127.0.0.1")
    pooled.close()
    assert [*pooled.host._drafters] == ["twin"]
