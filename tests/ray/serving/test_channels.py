"""Every kind of channel: the engine's text over it is the target's own, and its other side's death is noticed."""

import json
import os
import signal
import time
from typing import get_args

import pytest
from rich.console import Console
from shape_checks import unchecked
from side_by_side import GREEDY, SHAPES
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target, save_chat_target

from moray.bench.configs import ChannelName, ChannelsBenchmarkConfig
from moray.bench.conversations import DRAFTER, OnePlace, drafts_of
from moray.config import validate
from moray.decoding.engine import Engine
from moray.decoding.engine_config import EngineConfig
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request
from moray.decoding.speculate import PlainDecoder
from moray.decoding.together import answer_together
from moray.errors import ConfigError, UnreachableError

pytestmark = pytest.mark.slow

CAPACITY = 320
CHAIN = SHAPES["chain"]
KINDS = get_args(ChannelName)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("channels"))


@pytest.fixture(scope="module")
def drafter(tiny):
    return build(tiny, VARIANTS["moa-0"])


@pytest.fixture(scope="module")
def signs(tmp_path_factory):
    """A folder for files by which far sides are told that they may answer."""
    return tmp_path_factory.mktemp("signs")


@pytest.fixture(scope="module")
def ways(ray_session, drafter, signs):
    """A process behind every kind of channel: it drafts, or, prepared with a number, echoes once a file has that
    name."""
    from moray.cluster.channels.far_side import Answerer
    from moray.cluster.channels.ways import open_ways

    capacity, shape = CAPACITY, CHAIN

    def make():
        class Drafting(Answerer):
            def __init__(self):
                self._draft, self._topic = drafts_of(drafter, capacity, shape), None

            def answer(self, frame):
                if self._topic is None:
                    return self._draft(frame)
                while not (signs / str(self._topic)).exists():
                    time.sleep(0.001)
                return bytes(frame)

            def prepare(self, topic):
                self._topic = topic

        return Drafting()

    with open_ways(KINDS, make) as opened:
        yield opened


@pytest.fixture
def channel(ways, kind):
    opened = ways[kind].connect()
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own(tiny, drafter, ways, kind):
    requests = [
        Request(prompt=tuple(tiny.prompt(seed, length)), params=GREEDY, max_new_tokens=30, sequence=seed)
        for seed, length in enumerate((9, 1, 120, 30, 17))
    ]
    opened = []

    def connect(_):
        opened.append(ways[kind].connect())
        return opened[-1]

    with unchecked():
        source = RemoteDrafts(drafter, DRAFTER, OnePlace(), timeout=30, connect=connect)
        limits = EngineConfig(max_sequences=3, kv_tokens=3 * 384, capacity=CAPACITY, tree=CHAIN)
        engine = Engine(tiny.target, limits, (), drafts={DRAFTER: source})
        made = answer_together(engine, requests)
        decoder = PlainDecoder(tiny.target, CAPACITY)
        alone = [decoder.generate(list(r.prompt), GREEDY, 30, (), sequence=r.sequence).tokens for r in requests]
    for each in opened:
        each.close()
    assert [generation.tokens for generation in made] == alone
    assert engine.stats.num_drafts > 20
    assert (len(opened), source.stats.num_lost, source.stats.num_late, source.stats.num_misses) == (1, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_come_in_order_whenever_they_are_looked_for(ways, kind, channel, signs):
    assert channel.receive(0.0) is None
    number = KINDS.index(kind)
    ways[kind].prepare(number)
    frames = [b"one", os.urandom(3_000_000), b"three"]  # the second is larger than a graph's buffers at first
    channel.send(frames[0])
    assert channel.receive(0.0) is None
    assert channel.receive(0.01) is None
    (signs / str(number)).touch()
    channel.send(frames[1])
    assert [channel.receive(30.0) for _ in range(2)] == frames[:2]
    channel.send(frames[2])
    assert channel.receive(30.0) == frames[2]
    ways[kind].prepare(None)


def test_serve_is_not_taken_over_where_it_runs(ways):
    from ray import serve

    from moray.cluster.own_serve import own_serve

    running = set(serve.status().applications)
    assert len(running) == 2
    with pytest.raises(ConfigError, match="Serve runs on this Ray already"), own_serve():
        pass
    assert set(serve.status().applications) == running


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_cannot_be_answered_ends_the_channel(kind, channel):
    channel.send(b"damaged")
    reason = None if kind == "socket" else "the drafter failed: DataError: "  # a socket is only closed
    with pytest.raises(UnreachableError, match=reason):
        channel.receive(30.0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "handle tuned"])  # it waits as long as the other
def test_a_dead_other_side_is_noticed(ways, kind, channel, signs):
    number = KINDS.index(kind)
    (signs / str(number)).touch()
    ways[kind].prepare(number)
    channel.send(b"hello")
    assert channel.receive(30.0) == b"hello"
    os.kill(ways[kind].pid(), signal.SIGKILL)

    def ask_until_it_fails():
        for _ in range(120):  # Serve's router waits for a new replica
            channel.send(b"hello")
            channel.receive(1.0)

    with pytest.raises(UnreachableError):
        ask_until_it_fails()


def test_the_benchmark_measures_what_was_recorded(ray_session, tmp_path, capsys):
    from moray.cluster.channel_benchmark import benchmark_channels, print_channels_benchmark

    target, questions = save_chat_target(tmp_path / "target"), tmp_path / "questions.jsonl"
    rows = [{"question_id": n, "category": "demo", "turns": [f"number {n} " * (1 + n)]} for n in range(5)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "target": {"model": str(target), "device": "cpu"},
        "drafter": {"type": "pretrained", "model": str(target)},
        "questions": str(questions),
        "channels": ["socket", "compiled graph"],
        "batches": [1, 3],
        "num_cycles": 12,
        "max_new_tokens": 20,
        "rounds": 2,
    }
    result = benchmark_channels(validate(ChannelsBenchmarkConfig, settings), Console(quiet=True))
    result = json.loads(json.dumps(result))
    pairs = [(row["batch"], row["channel"]) for row in result["rows"]]
    assert pairs == [(1, "socket"), (1, "compiled graph"), (3, "socket"), (3, "compiled graph")]
    for row in result["rows"]:
        assert row["num_cycles"] >= 24
        assert 0 < row["milliseconds"]["median"] <= row["milliseconds"]["p99"]
        assert row["milliseconds_beside_drafting"]["median"] > 0
        assert row["equal_drafts_share"] == 1.0, "another process drafts the same from the same messages"
        assert row["bytes_out_most"] >= row["bytes_out"] > row["bytes_in"] > 0
    first, second = result["rows"][:2]
    assert (first["bytes_out"], first["bytes_in"]) == (second["bytes_out"], second["bytes_in"])
    print_channels_benchmark(result, Console(width=100))
    assert "compiled graph" in capsys.readouterr().out
