"""Drafts over sockets: the same text whatever happens to the drafter, and the same drafts while nothing does."""

import secrets
import socket
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from shape_checks import unchecked
from side_by_side import COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import DraftJob, LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.remote import drafter_pool as places
from moray.decoding.remote import source as source_module
from moray.decoding.remote.channel import Endpoint, SocketChannel, SocketServer
from moray.decoding.remote.drafter_pool import DrafterPool
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import DraftReply, DraftRequest, Entry, pack, unpack_reply, unpack_request
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request
from moray.decoding.sampling.sampler import Sampler
from moray.errors import DataError, UnreachableError

CAPACITY = 320
CHAIN = SHAPES["chain"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("remote"))


class Pool(DrafterPool):
    """Drafter processes that live in threads of this one, and who has a place with which."""

    def __init__(self, drafter, count: int = 1) -> None:
        self.drafter = drafter
        self.servers: dict[Endpoint, tuple[SocketServer, DraftHost]] = {}
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.delay = 0.0
        for _ in range(count):
            self.start()

    def start(self) -> Endpoint:
        host, secret = DraftHost({"d": self.drafter}, CAPACITY, 64), secrets.token_hex(32)

        def answer(frame) -> bytes:
            time.sleep(self.delay)
            return pack(host.handle(*unpack_request(frame)))

        server = SocketServer(answer, "127.0.0.1", secret)
        endpoint = Endpoint("127.0.0.1", server.port, secret, str(server.port))
        self.servers[endpoint] = server, host
        return endpoint

    def kill(self) -> None:
        endpoint = next(iter(self.servers))
        self.servers.pop(endpoint)[0].close()

    def open(self, session):
        self.opened.append(session)

    def find(self, session):
        endpoints = list(self.servers)
        return endpoints[self.opened.index(session) % len(endpoints)] if endpoints else None

    def lose(self, session):
        pass

    def close(self, session):
        self.closed.append(session)

    def stop(self) -> None:
        while self.servers:
            self.kill()


@pytest.fixture
def pool_of(tiny):
    pools: list[Pool] = []

    def make(variant: str = "moa-0", count: int = 1) -> Pool:
        pools.append(Pool(build(tiny, VARIANTS[variant]), count))
        return pools[-1]

    yield make
    for pool in pools:
        pool.stop()


def engine_of(tiny, source, shape=CHAIN, **limits) -> Engine:
    config = EngineConfig(
        **{"max_num_seqs": 3, "kv_cache_tokens": 3 * 384, "max_model_len": CAPACITY, "tree": shape} | limits
    )
    return Engine(tiny.target, config, (), drafts={"d": source})


def requests_of(tiny, params=(GREEDY, COUPLED), count: int = 5) -> list[Request]:
    lengths = (9, 1, 120, 30, 17)
    return [
        Request(
            prompt=tuple(tiny.prompt(seed, lengths[seed % 5])),
            params=params[seed % len(params)],
            max_new_tokens=30,
            sequence=seed,
        )
        for seed in range(count)
    ]


def alone(tiny, requests) -> list[list[int]]:
    decoder = PlainDecoder(tiny.target, CAPACITY)
    return [
        decoder.generate(list(r.prompt), r.params, r.max_new_tokens, (), sequence=r.sequence).tokens for r in requests
    ]


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.mark.parametrize(
    ("variant", "shape", "num_micro_batches"),
    [
        pytest.param(variant, shape, 1 + (i + j) % 2, id=f"{variant}-{name}-{1 + (i + j) % 2}")
        for i, variant in enumerate(["moa-0", "moa-2", "eagle-0", "independent-0", "medusa-0", "ngram-0"])
        for j, (name, shape) in enumerate(SHAPES.items())
    ],
)
def test_text_and_drafts_are_those_of_a_drafter_in_process(tiny, pool_of, variant, shape, num_micro_batches):
    pool, requests = pool_of(variant), requests_of(tiny)
    source = RemoteDrafts(pool.drafter, "d", pool, timeout=10, max_inflight=2 * num_micro_batches)
    remote = engine_of(tiny, source, shape, num_micro_batches=num_micro_batches)
    made = answer_batch(remote, requests)
    local = answer_batch(engine_of(tiny, LocalDrafts(pool.drafter, CAPACITY, 64), shape), requests)
    assert [g.tokens for g in made] == alone(tiny, requests)
    assert [g.accepted for g in made] == [g.accepted for g in local]
    assert sorted(pool.opened) == sorted(pool.closed), "every place is given back"


def test_rejection_works_though_distributions_do_not_cross(tiny, pool_of):
    """A chain's tokens are then the likeliest ones, tested as point masses; the law itself is not tested here."""
    pool = pool_of()
    requests = requests_of(tiny, (SamplingParams(temperature=0.8, seed=1, acceptance_method="rejection"),))
    made = answer_batch(engine_of(tiny, RemoteDrafts(pool.drafter, "d", pool, timeout=10)), requests)
    trees = answer_batch(engine_of(tiny, LocalDrafts(pool.drafter, CAPACITY, 64), SHAPES["fixed"]), requests)
    assert [g.tokens for g in made] != [g.tokens for g in trees], "by rejection the text depends on what was drafted"
    assert all(len(generation.tokens) == 30 for generation in made)


def test_a_drafter_that_dies_costs_nothing_but_speed(tiny, pool_of):
    """The sequences are told to the one that takes its place, from the beginning."""
    pool, requests = pool_of("moa-0", 2), requests_of(tiny)
    source = RemoteDrafts(pool.drafter, "d", pool, timeout=10)
    engine, answers = engine_of(tiny, source), {}
    for request in requests:
        answers[engine.submit(request)] = []
    drafted_after = 0
    while engine.is_busy:
        if engine.stats.num_steps in (4, 9, 14):
            pool.start()
            pool.kill()
        for update in engine.step():
            answers[update.number] += update.tokens
            drafted_after += update.num_levels if source.stats.num_lost >= 3 else 0
    assert list(answers.values()) == alone(tiny, requests)
    assert source.stats.num_lost >= 3
    assert drafted_after > 0, "speculation comes back"


def test_without_any_drafter_decoding_is_plain(tiny, pool_of):
    pool, requests = pool_of(), requests_of(tiny)
    pool.stop()
    engine = engine_of(tiny, RemoteDrafts(pool.drafter, "d", pool, timeout=10))
    assert [g.tokens for g in answer_batch(engine, requests)] == alone(tiny, requests)
    assert engine.stats.num_drafts == 0


def test_late_drafts_are_done_without(tiny, pool_of):
    """Whoever has not answered is not asked again before it has, and is not waited for longer than was said."""
    pool, requests = pool_of(), requests_of(tiny, count=2)
    pool.delay = 0.05
    source = RemoteDrafts(pool.drafter, "d", pool, timeout=0.005)
    engine = engine_of(tiny, source)
    assert [g.tokens for g in answer_batch(engine, requests)] == alone(tiny, requests)
    assert source.stats.num_late > 0
    assert source.stats.num_cycles < engine.stats.num_passes


def test_a_drafter_that_was_late_once_is_asked_again(tiny, pool_of):
    """Once it has answered, the same sequence is drafted for again."""
    pool, (request,) = pool_of(), requests_of(tiny, count=1)
    source = RemoteDrafts(pool.drafter, "d", pool, timeout=0.02)
    engine, levels = engine_of(tiny, source), []
    engine.submit(request)
    while engine.is_busy:
        pool.delay = 0.1 if len(levels) == 3 else 0.0
        levels += [update.num_levels for update in engine.step()]
        time.sleep(0.03)
    assert source.stats.num_late > 0
    assert levels[-1] > 0, "speculation is back"


def test_a_draft_that_comes_too_late_is_never_taken_for_that_of_another_root(tiny, pool_of):
    """It waits for the next job, which finds its drafter gone and so brings nothing: nothing is what is collected."""
    pool, lines = pool_of("ngram-0"), []
    source = RemoteDrafts(
        pool.drafter,
        "d",
        pool,
        timeout=0.01,
        connect=lambda place: lines.append(SocketChannel(place)) or lines[-1],
    )
    sampler = Sampler(GREEDY, tiny.target.spec.vocab_size, torch.device("cpu"), 0)
    source.open(0)
    source.extend(0, torch.tensor([3, 4, 5, 3, 4]), {}, 0)
    assert source.can_draft(0)
    pool.delay = 0.1
    source.submit([DraftJob(0, 5, 5, CHAIN, sampler)])
    assert source.collect([0]) == {}, "it is late"
    deadline = time.monotonic() + 10
    while not source.can_draft(0):
        assert time.monotonic() < deadline, "once it has answered it is asked again"
        time.sleep(0.01)
    assert source.stats.num_misses == 0
    lines[0].close()
    source.extend(0, torch.tensor([5]), {}, 0)
    source.submit([DraftJob(0, 9, 6, CHAIN, sampler)])
    assert source.collect([0]) == {}


def test_a_draft_is_under_way_until_it_is_there_or_its_drafter_is_gone(tiny, pool_of):
    pool, lines = pool_of("ngram-0"), []
    source = RemoteDrafts(
        pool.drafter, "d", pool, timeout=0.01, connect=lambda place: lines.append(SocketChannel(place)) or lines[-1]
    )
    sampler = Sampler(GREEDY, tiny.target.spec.vocab_size, torch.device("cpu"), 0)
    source.open(0)
    source.extend(0, torch.tensor([3, 4, 5, 3, 4]), {}, 0)
    assert source.can_draft(0)
    assert not source.is_under_way(0), "it was not asked for"

    def wait() -> None:
        deadline = time.monotonic() + 10
        while source.is_under_way(0):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    pool.delay = 0.2
    source.submit([DraftJob(0, 5, 5, CHAIN, sampler)])
    assert source.is_under_way(0)
    wait()
    assert source.collect([0])[0].num_nodes > 1
    source.extend(0, torch.tensor([5]), {}, 0)
    assert source.can_draft(0)
    source.submit([DraftJob(0, 3, 6, CHAIN, sampler)])
    assert source.is_under_way(0)
    lines[0].close()
    wait()
    assert source.collect([0]) == {}
    assert source.stats.num_lost == 1
    assert source.stats.num_late == 0


def test_a_drafter_that_has_forgotten_says_so_and_is_told_again(tiny, pool_of):
    pool, requests = pool_of(), requests_of(tiny, count=3)
    source = RemoteDrafts(pool.drafter, "d", pool, timeout=10)
    engine, answers = engine_of(tiny, source), {}
    for request in requests:
        answers[engine.submit(request)] = []
    while engine.is_busy:
        if engine.stats.num_steps == 5:
            (_, host), *_ = pool.servers.values()
            for session in list(pool.opened):
                host._close(session)
        for update in engine.step():
            answers[update.number] += update.tokens
    assert list(answers.values()) == alone(tiny, requests)
    assert source.stats.num_misses > 0
    assert engine.stats.num_drafts > 20


def test_cancelled_sequences_leave_both_sides(tiny, pool_of):
    pool = pool_of()
    engine = engine_of(tiny, RemoteDrafts(pool.drafter, "d", pool, timeout=10))
    numbers = [engine.submit(request) for request in requests_of(tiny)]
    for _ in range(4):
        engine.step()
    for number in numbers:
        engine.cancel(number)
    assert not engine.is_busy
    assert engine.kv_used == 0
    assert sorted(pool.opened) == sorted(pool.closed)


def test_what_cannot_be_reached_is_left_alone_for_longer_and_longer(monkeypatch, tiny, pool_of):
    """Each attempt stops the engine for as long as it may take: there are few."""
    now, attempts = [0.0], []
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def connect(place):
        attempts.append(now[0])
        raise UnreachableError("a firewall")

    pool, requests = pool_of(), requests_of(tiny)
    engine = engine_of(tiny, RemoteDrafts(pool.drafter, "d", pool, timeout=10, connect=connect))
    answers = {engine.submit(request): [] for request in requests}
    while engine.is_busy:
        now[0] += 0.25
        for update in engine.step():
            answers[update.number] += update.tokens
    assert list(answers.values()) == alone(tiny, requests)
    pauses = [after - before for before, after in pairwise(attempts)]
    assert len(pauses) >= 2
    assert pauses[0] >= 1.0
    assert all(after >= 1.9 * before for before, after in pairwise(pauses))


def test_many_sequences_are_told_in_several_messages(monkeypatch, tiny, pool_of):
    """One after the other, where their memory does not fit into one message; each is drafted for all the same."""
    monkeypatch.setattr(source_module, "_MAX_MEMORY_BYTES", 4096)
    pool, requests = pool_of(), requests_of(tiny)
    sent, engine = [], engine_of(tiny, RemoteDrafts(pool.drafter, "d", pool, timeout=10), SHAPES["fixed"])
    monkeypatch.setattr(source_module, "pack", lambda request, tensors: sent.append(request) or pack(request, tensors))
    made = answer_batch(engine, requests)
    assert [generation.tokens for generation in made] == alone(tiny, requests)
    assert engine.stats.num_missed > 0, "all were told at once"
    assert {entry.session for request in sent for entry in request.entries} == set(pool.opened)


def test_a_drafter_that_ends_while_nobody_drafts_there_is_noticed(tiny, pool_of):
    channels = []
    pool, requests = pool_of(), requests_of(tiny, count=1)
    source = RemoteDrafts(
        pool.drafter, "d", pool, timeout=10, connect=lambda place: channels.append(SocketChannel(place)) or channels[-1]
    )
    for number in range(2):
        answer_batch(engine_of(tiny, source), requests)
        assert len(channels) == number + 1
        pool.start()
        pool.kill()
    assert channels[0]._socket.fileno() == -1, "its socket is closed"


# --- The wire ---


def test_frames_hold_what_was_packed():
    request = DraftRequest(
        number=3,
        entries=(Entry(session="a", drafter="d", known=0, tokens=(1, 2), num_kept=1, root=5),),
        shapes=(CHAIN,),
        params=(COUPLED,),
        closed=("b",),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = [torch.randn(2, 6).to(dtype), torch.randn(1, 6).to(dtype)]
        found, tensors = unpack_request(pack(request, {"cross": rows}))
        assert found == request
        assert torch.equal(tensors["cross"], torch.cat(rows))
    assert unpack_reply(pack(DraftReply(number=1, trees=()))).number == 1


def test_damaged_frames_are_refused():
    frame = pack(DraftReply(number=1, trees=()), {"x": [torch.zeros(4, 4)]})
    for damaged in (b"", frame[:5], frame[:-1], b"\xff" * 40, frame[:8] + b"{" * (len(frame) - 8)):
        with pytest.raises(DataError, match="damaged"):
            unpack_reply(damaged)
    with pytest.raises(DataError, match="damaged"):
        unpack_request(frame)


def test_only_who_knows_the_secret_is_listened_to():
    asked: list[bytes] = []
    secret = secrets.token_hex(32)
    server = SocketServer(lambda frame: asked.append(bytes(frame)) or b"yes", "127.0.0.1", secret)
    try:
        stranger = SocketChannel(Endpoint("127.0.0.1", server.port, secrets.token_hex(32), "x"))
        stranger.send(b"hello")
        with pytest.raises(UnreachableError):
            stranger.receive(5)
        flood = socket.create_connection(("127.0.0.1", server.port))
        flood.sendall(bytes.fromhex(secret) + b"\xff" * 8)
        assert flood.recv(1) == b"", "a frame too long to be one ends the connection"
        friend = SocketChannel(Endpoint("127.0.0.1", server.port, secret, "x"))
        friend.send(b"hello")
        assert friend.receive(5) == b"yes"
        assert friend.receive(0.01) is None
        assert asked == [b"hello"]
        assert secret not in repr(Endpoint("127.0.0.1", server.port, secret, "x"))
    finally:
        server.close()
    with pytest.raises(UnreachableError):
        friend.receive(5)


def test_frames_of_any_size_are_answered_in_order():
    may_answer, secret = threading.Event(), secrets.token_hex(32)
    server = SocketServer(lambda frame: may_answer.wait(30) and bytes(frame), "127.0.0.1", secret)
    try:
        channel = SocketChannel(Endpoint("127.0.0.1", server.port, secret, "x"))
        frames = [b"one", secrets.token_bytes(3_000_000), b"three"]  # the second is larger than a socket's buffers
        channel.send(frames[0])
        assert channel.receive(0.0) is None
        assert channel.receive(0.01) is None
        may_answer.set()
        channel.send(frames[1])
        assert [channel.receive(30.0) for _ in range(2)] == frames[:2]
        channel.send(frames[2])
        assert channel.receive(30.0) == frames[2]
        channel.close()
    finally:
        server.close()


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_place_that_ends_under_a_sequence_is_looked_for_anew(tiny, pool_of):
    """A lease that ended by itself: its drafter answers with misses for good, while another has a place."""
    pool, request = pool_of(count=2), requests_of(tiny)[0]
    source = RemoteDrafts(pool.drafter, "d", pool, timeout=10)
    engine = engine_of(tiny, source)
    engine.submit(request)
    tokens: list[int] = []
    while engine.stats.num_drafts < 2:
        tokens += [token for update in engine.step() for token in update.tokens]
    first, (server, host) = next(iter(pool.servers.items()))
    host.close(pool.opened[0])
    del pool.servers[first]  # no place is to be found there any more, but its process goes on
    num_drafts = engine.stats.num_drafts
    try:
        while engine.is_busy:
            tokens += [token for update in engine.step() for token in update.tokens]
    finally:
        server.close()
    assert [tokens] == alone(tiny, [request])
    assert engine.stats.num_drafts > num_drafts + 2
    assert source.stats.num_misses == 1


def test_ends_that_come_while_a_draft_is_under_way_wait_for_nobody(monkeypatch, tiny):
    """Who says them is an event loop; in what order they came counts."""
    drafter = build(tiny, VARIANTS["ngram-0"])
    host = DraftHost({"d": drafter}, CAPACITY, 64)
    entries = tuple(Entry(session=name, drafter="d", known=0, tokens=(1, 2), num_kept=0) for name in "abc")
    host.handle(DraftRequest(number=1, entries=entries), {})
    is_drafting, may_end, propose = threading.Event(), threading.Event(), type(drafter).propose_many

    def slow(*args: object) -> object:
        is_drafting.set()
        assert may_end.wait(30)
        return propose(drafter, *args)

    monkeypatch.setattr(drafter, "propose_many", slow)
    jobs = tuple(entry.model_copy(update={"known": 2, "tokens": (), "root": 3}) for entry in entries)
    thread = threading.Thread(
        target=host.handle, args=(DraftRequest(number=2, entries=jobs, shapes=(CHAIN,), params=(GREEDY,)), {})
    )
    thread.start()
    assert is_drafting.wait(30)
    host.close("a")
    host.close("b")
    host.open("b")
    host.open("c")
    host.close("c")
    assert thread.is_alive()
    assert host.num_sessions == 3
    may_end.set()
    thread.join()
    assert host.num_sessions == 0
    trees = host.handle(DraftRequest(number=3, entries=entries), {}).trees
    assert [tree.known for tree in trees] == [0, 2, 0], "the one opened last may begin"


def test_how_long_a_sequence_is_unused_and_that_it_is_gone_for_good(tiny):
    host = DraftHost({"d": build(tiny, VARIANTS["ngram-0"])}, CAPACITY, 64)
    assert host.seconds_unused("a") == float("inf"), "it was never asked for"
    entry = Entry(session="a", drafter="d", known=0, tokens=(1, 2), num_kept=0)
    host.handle(DraftRequest(number=1, entries=(entry,)), {})
    time.sleep(0.1)
    assert 0.1 <= host.seconds_unused("a") < 60
    host.expire("a")
    host.expire("a")
    assert (host.num_sessions, host.stats.num_expired) == (0, 1)
    (answer,) = host.handle(DraftRequest(number=2, entries=(entry,)), {}).trees
    assert answer.known == 0, "what is still under way begins nothing"


def test_idle_sessions_expire(tiny):
    drafter = build(tiny, VARIANTS["ngram-0"])
    host = DraftHost({"d": drafter}, CAPACITY, 64, idle_seconds=0.05)
    entry = Entry(session="a", drafter="d", known=0, tokens=(1, 2), num_kept=0)
    host.handle(DraftRequest(number=1, entries=(entry,)), {})
    assert host.num_sessions == 1
    time.sleep(0.1)
    host.handle(DraftRequest(number=2, entries=()), {})
    assert host.num_sessions == 0
    assert host.stats.num_expired == 1


def test_what_comes_after_the_end_begins_nothing(tiny):
    """A message that was under way when the sequence ended; the same sequence may come back by a new lease."""
    host = DraftHost({"d": build(tiny, VARIANTS["ngram-0"])}, CAPACITY, 64)
    entry = Entry(session="a", drafter="d", known=0, tokens=(1, 2), num_kept=0)
    host.close("a")
    (answer,) = host.handle(DraftRequest(number=1, entries=(entry,)), {}).trees
    assert (answer.known, host.num_sessions) == (0, 0)
    host.open("a")
    (answer,) = host.handle(DraftRequest(number=2, entries=(entry,)), {}).trees
    assert (answer.known, host.num_sessions) == (2, 1)
