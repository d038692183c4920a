"""What is counted is published once, no matter when it is read; latencies and endings of sequences are told."""

import asyncio
import functools
import logging
from collections import Counter

import httpx
import pytest
from remembering_sink import RememberingSink
from starlette.responses import PlainTextResponse
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.params import SamplingParams
from moray.decoding.remote.host import DraftHost, HostStats
from moray.decoding.request import Request, RequestOutput
from moray.trees.shapes import ChainShape
from serve.api.errors import ApiError
from serve.metrics import series
from serve.metrics.latencies import watched
from serve.metrics.publisher import Publisher, Reading
from serve.metrics.readings import read_engine, read_host
from serve.metrics.statuses import StatusCounter

NUM_ANSWERS = 6


def in_event_loop(test):
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return run


@pytest.fixture
def sink():
    return RememberingSink()


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A sink that was told of an engine again and again while it answered, the updates, and the most of each gauge."""
    tiny = load_target(tmp_path_factory.mktemp("metrics"))
    drafter = build(tiny, VARIANTS["pretrained-0"])
    config = EngineConfig(max_num_seqs=4, kv_cache_tokens=2048, tree=ChainShape(type="chain", depth=3))
    sources = {"noisy": LocalDrafts(drafter, tiny.target.spec.max_positions, config.tree.num_expanded)}
    engine = Engine(tiny.target, config, (), drafts=sources)
    sink = RememberingSink()
    publisher = Publisher(sink, lambda: read_engine(engine))
    for number in range(NUM_ANSWERS):
        params = SamplingParams(seed=number, temperature=0.5 * (number % 2))
        engine.submit(Request(prompt=tuple(tiny.prompt(number)), params=params, max_new_tokens=7 + 2 * number))
    updates = []
    most = {"running": 0, "waiting": 0, "kv": 0.0}
    while engine.is_busy:
        updates += engine.step()
        publisher.publish()
        most["running"] = max(most["running"], sink.now[series.RUNNING.name])
        most["waiting"] = max(most["waiting"], sink.now[series.WAITING.name])
        most["kv"] = max(most["kv"], sink.now[series.KV_USAGE.name])
    publisher.publish()
    return engine, sink, updates, most


def test_tokens_are_those_of_the_answers(answered):
    engine, sink, updates, _ = answered
    assert sink.total(series.GENERATION_TOKENS) == sum(len(update.tokens) for update in updates)
    assert sink.total(series.PROMPT_TOKENS) == 9 * NUM_ANSWERS
    assert sink.total(series.CYCLES) == engine.stats.num_passes


def test_drafts_and_what_was_accepted_agree_with_the_updates(answered):
    _, sink, updates, _ = answered
    accepted = sink.total(series.ACCEPTED_TOKENS)
    assert accepted == sum(update.num_accepted for update in updates) > 0
    assert sink.total(series.ACCEPTED_AT) == accepted
    assert sink.total(series.DRAFT_TOKENS) == 3 * sink.total(series.NUM_DRAFTS)
    by_position = [sink.sums[series.ACCEPTED_AT.name, str(position)] for position in range(3)]
    assert by_position == sorted(by_position, reverse=True)


def test_tau_counts_no_first_token(answered):
    _, sink, updates, _ = answered
    tokens = sum(len(update.tokens) for update in updates) - NUM_ANSWERS
    assert sink.total(series.DECODE_TOKENS) == tokens
    assert 1 < tokens / sink.total(series.DECODE_PASSES) < 4


def test_no_second_is_in_two_phases(answered):
    engine, sink, _, _ = answered
    told = {tags[0]: value for (name, *tags), value in sink.sums.items() if name == series.PHASE_SECONDS.name}
    assert {"verify", "propose", "accept", "commit", "prefill", "admit"} <= set(told)
    timed = engine.stats.seconds
    assert sum(told.values()) == pytest.approx(sum(timed.values()))


def test_gauges_follow_the_engine(answered):
    _, sink, _, most = answered
    assert most["running"] == 4
    assert most["waiting"] >= 1
    assert 0 < most["kv"] <= 1
    assert sink.now[series.RUNNING.name] == sink.now[series.WAITING.name] == sink.now[series.KV_USAGE.name] == 0


def test_a_drafter_s_batches_are_counted_by_size(sink):
    host = DraftHost({}, 8, 1)
    publisher = Publisher(sink, lambda: read_host(host))
    publisher.publish()
    assert (sink.now, sink.sums, dict(sink.seen)) == ({series.DRAFTER_SESSIONS.name: 0}, {}, {})
    host.stats = HostStats(num_requests=4, num_drafts=9, seconds=0.5, batch_sizes=Counter({3: 2, 1: 1}))
    publisher.publish()
    host.stats.batch_sizes.update([2, 3])
    publisher.publish()
    assert sorted(sink.seen[series.DRAFTER_BATCH.name]) == [1, 2, 3, 3, 3]
    assert sink.total(series.DRAFTER_DRAFTS) == 9


def test_a_counter_read_between_two_numbers_is_not_told_twice(sink):
    values = iter([2.0, 5.0, 4.0, 4.5, 6.0])
    publisher = Publisher(sink, lambda: [Reading(series.CYCLES, next(values))])
    for _ in range(5):
        publisher.publish()
    assert sink.total(series.CYCLES) == 6


@in_event_loop
async def test_a_reading_that_fails_is_not_the_last(sink, caplog):
    values = iter([1, None, 3])

    def read():
        value = next(values, 3)
        if value is None:
            raise ValueError("not now")
        return [Reading(series.CYCLES, value)]

    publisher = Publisher(sink, read)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        publisher.start(0.001)
        publisher.start(0.001)
        while sink.total(series.CYCLES) < 3:
            await asyncio.sleep(0.001)
    assert [record.message for record in caplog.records] == ["metrics could not be published"]


async def _updates(*updates, error=None):
    for number, (tokens, reason) in enumerate(updates):
        await asyncio.sleep(0.01)
        yield RequestOutput(number, [1] * tokens, finish_reason=reason)
    if error is not None:
        raise error


@in_event_loop
async def test_latencies_of_a_sequence(sink):
    ended = [update async for update in watched(_updates((2, None), (0, None), (3, None), (1, "length")), sink)]
    assert [update.number for update in ended] == [0, 1, 2, 3]
    (first,), (whole,), (each,) = (
        sink.seen[name.name]
        for name in (series.TIME_TO_FIRST_TOKEN, series.REQUEST_LATENCY, series.TIME_PER_OUTPUT_TOKEN)
    )
    gaps = sink.seen[series.INTER_TOKEN_LATENCY.name]
    assert len(gaps) == 2
    assert first >= 0.01
    assert whole == pytest.approx(first + sum(gaps))
    assert each == pytest.approx(sum(gaps) / 4)
    assert dict(sink.sums) == {(series.REQUESTS.name, "length"): 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ApiError(429, "full"), "refused"), (ApiError(503, "gone"), "error"), (ValueError("a defect"), "error")],
)
@in_event_loop
async def test_failures_are_told_apart(sink, error, reason):
    with pytest.raises(type(error)):
        [update async for update in watched(_updates((1, None), error=error), sink)]
    assert dict(sink.sums) == {(series.REQUESTS.name, reason): 1}
    assert series.REQUEST_LATENCY.name not in sink.seen


@in_event_loop
async def test_a_client_that_leaves_is_an_abort_and_closes_the_source(sink):
    source = _updates((1, None), (1, None), (1, "stop"))
    stream = watched(source, sink)
    await anext(stream)
    await stream.aclose()
    assert dict(sink.sums) == {(series.REQUESTS.name, "abort"): 1}
    assert [update async for update in source] == []


@in_event_loop
async def test_answers_are_counted_by_path_and_status(sink):
    from fastapi import FastAPI

    api = FastAPI()
    api.get("/things/{name}")(lambda name: PlainTextResponse(name, 201))
    transport = httpx.ASGITransport(StatusCounter(api, sink))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/things/a", "/things/b", "/nowhere", "/elsewhere"):
            await client.get(path)
        await client.post("/things/a")
    name = series.ANSWERS.name
    told = {tags: count for (told, *tags), count in sink.sums.items() if told == name for tags in [tuple(tags)]}
    assert told.pop(("/things/{name}", "201")) == 2
    assert told.pop(("other", "404")) == 2
    assert [(status, count) for (_, status), count in told.items()] == [("405", 1)]


def test_names_are_ours_and_unique():
    assert all(name.startswith("moray_") and name == each.name for name, each in series.ALL.items())
    declared = [value for value in vars(series).values() if isinstance(value, series.Series)]
    assert len(declared) == len(series.ALL)
    assert all(each.buckets == tuple(sorted(each.buckets)) for each in declared)
    assert all(bool(each.buckets) == (each.kind == "histogram") for each in declared)
