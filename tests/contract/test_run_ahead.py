"""Drafting on while the target verifies: no text and no later draft depends on it, whatever was guessed."""

import secrets
import threading
import time

import pytest
import torch
from one_place import OnePlace
from shape_checks import unchecked
from side_by_side import COUPLED, GREEDY
from tiny_batches import taps_of

from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.engine import Engine
from moray.decoding.plain import PlainDecoder
from moray.decoding.remote.ahead import Guess
from moray.decoding.remote.channel import Channel, Endpoint, SocketChannel, SocketServer
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import DraftRequest, Entry, pack, unpack_request
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request
from moray.errors import UnreachableError
from moray.trees.shapes import ChainShape, FixedShape, GrowableShape, num_expanded_ahead

CAPACITY, DEPTH = 128, 2
CHAIN = ChainShape(type="chain", depth=DEPTH)
LONG = ChainShape(type="chain", depth=num_expanded_ahead(DEPTH))
PARAMS = (GREEDY, COUPLED, GREEDY)
ALL = 99
RIGHT = -1
SCRIPT = ((0, ALL), (2, ALL), (1, 2), (RIGHT, ALL), (1, ALL), (RIGHT, ALL), (RIGHT, 1), (2, ALL), (0, 0), (2, ALL))
"""Of each cycle: how many drafted tokens are accepted, with another token behind them than was drafted, or all with the
one that was guessed; and before it, for how many levels there is time."""


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


class Texts:
    """Sequences as their target knows them, told to a host as their target would."""

    def __init__(self, tiny, drafter, run_ahead: bool = True) -> None:
        self.tiny, self.drafter = tiny, drafter
        self.host = self.new_host(run_ahead)
        self.texts = [tiny.prompt(seed, 7 + seed) for seed in range(len(PARAMS))]  # the last token is the root
        self.told, self.kept = [0] * len(PARAMS), [0] * len(PARAMS)
        self._memory = {}

    def new_host(self, run_ahead: bool) -> DraftHost:
        return DraftHost({"d": self.drafter}, CAPACITY, LONG.depth, run_ahead=run_ahead)

    def asked(self, host, told, kept, shape) -> list[list[int]]:
        """What a host that was told so much of each text drafts below its last token."""
        entries, memory = [], {}
        for number, (text, known) in enumerate(zip(self.texts, told, strict=True)):
            for name, tensor in self.memory(tuple(text)).items():
                memory.setdefault(name, []).append(tensor[0, known:-1])
            new = tuple(text[known:-1])
            entry = Entry(
                session=str(number), drafter="d", known=known, tokens=new, num_kept=kept[number], root=text[-1],
                params=number, sequence=number,
            )  # fmt: skip
            entries.append(entry)
        request = DraftRequest(number=1, entries=tuple(entries), shapes=(shape,), params=PARAMS)
        reply = host.handle(*unpack_request(pack(request, memory)))
        assert [tree.known for tree in reply.trees] == [len(text) - 1 for text in self.texts]
        return [list(tree.tokens) for tree in reply.trees]

    def memory(self, text: tuple[int, ...]):
        if text not in self._memory:
            taps = taps_of(self.tiny.target, torch.tensor([text]), self.drafter.observed)
            self._memory[text] = self.drafter.observe(taps)
        return self._memory[text]

    def ask(self) -> list[list[int]]:
        chains = self.asked(self.host, self.told, self.kept, CHAIN)
        self.told = [len(text) - 1 for text in self.texts]
        return chains

    def drafted_anew(self, shape: GrowableShape = CHAIN) -> list[list[int]]:
        """What a host drafts that never ran ahead, and is told everything at once."""
        return self.asked(self.new_host(False), [0] * len(PARAMS), [0] * len(PARAMS), shape)

    def guess(self, number: int) -> tuple[int, ...] | None:
        guess = self.host._sessions[str(number)].guess
        return None if guess is None else guess.chain

    def verify(self, number: int, chain: list[int], outcome: int) -> tuple[int, ...] | None:
        """Let the target accept some of a chain; what was drafted ahead, if it was right."""
        guess = self.guess(number)
        is_right = outcome == RIGHT and guess is not None
        accepted = len(chain) - 1 if is_right else min(max(outcome, 0), len(chain) - 1)
        expected = [*chain[1:], *(guess or [0])][accepted]
        following = expected if is_right else (expected + 1) % self.tiny.target.spec.vocab_size
        self.texts[number] += [*chain[1 : 1 + accepted], following]
        self.kept[number] = min(1 + accepted, len(chain) - 1)
        return guess if is_right else None


def work(host, most: int = ALL) -> None:
    for _ in range(most):
        if not host.go_on():
            return
    assert most < ALL, "there is an end to it"


def test_drafts_after_any_guess_are_those_of_who_never_guessed(tiny, drafter, variant):
    texts = Texts(tiny("llama"), drafter)
    rights: list[tuple[int, ...] | None] = [None] * len(PARAMS)
    for outcome, levels in SCRIPT:
        chains, anew = texts.ask(), texts.drafted_anew()
        for chain, other, right in zip(chains, anew, rights, strict=True):
            assert chain == (other if right is None else list(right))
        work(texts.host, levels)
        guesses = [texts.guess(number) for number in range(len(PARAMS))]
        if rights == [None] * len(PARAMS) and None not in guesses:
            drafted = [[*chain, *(guess or ())] for chain, guess in zip(chains, guesses, strict=True)]
            assert drafted == texts.drafted_anew(LONG), "as a chain drafted at once"
        rights = [texts.verify(number, chain, outcome) for number, chain in enumerate(chains)]
    if not variant.startswith("ngram"):  # which often has nothing to say
        assert texts.host.stats.ahead == {"right": 2 * len(PARAMS), "wrong": 4 * len(PARAMS), "unfinished": 9}


class DirectChannel(Channel):
    """To a host in this thread, which has all the time that it wants before it is asked."""

    def __init__(self, host: DraftHost) -> None:
        self._host, self._answers = host, []

    def send(self, frame):
        work(self._host)
        self._answers.append(pack(self._host.handle(*unpack_request(frame))))

    def receive(self, seconds):
        return self._answers.pop(0) if self._answers else None

    def close(self):
        pass


def answered(
    tiny, drafter, shape, endpoint, connect, num_micro_batches=1
) -> tuple[Engine, RemoteDrafts, list[list[int]]]:
    """Three sequences at a time: the text that the drafter knows by heart, sampled ones and others."""
    source = RemoteDrafts(
        drafter, "d", OnePlace(endpoint), timeout=10, connect=connect, max_inflight=1 + num_micro_batches
    )
    config = EngineConfig(
        max_num_seqs=3, kv_cache_tokens=3 * 192, max_model_len=CAPACITY, tree=shape, num_micro_batches=num_micro_batches
    )
    engine = Engine(tiny.target, config, (), drafts={"d": source})
    return engine, source, [made.tokens for made in answer_batch(engine, requests_of(tiny))]


def requests_of(tiny) -> list[Request]:
    return [
        Request(prompt=tuple(tiny.prompt(seed)), params=params, max_new_tokens=30, sequence=number)
        for number, (seed, params) in enumerate([(0, GREEDY), (0, COUPLED), (1, COUPLED), (0, GREEDY), (2, GREEDY)])
    ]


def plain(tiny) -> list[list[int]]:
    decoder = PlainDecoder(tiny.target, CAPACITY)
    return [
        decoder.generate(list(r.prompt), r.params, r.max_new_tokens, (), sequence=r.sequence).tokens
        for r in requests_of(tiny)
    ]


@pytest.mark.parametrize(("name", "num_micro_batches"), [("moa-0", 1), ("eagle-0", 2)])
def test_the_engine_gives_the_plain_text_and_guesses_come_true(tiny, learnt, name, num_micro_batches):
    target, drafter = tiny("llama"), learnt("llama", name)
    host = DraftHost({"d": drafter}, CAPACITY, LONG.depth, run_ahead=True)
    nowhere = Endpoint("", 0, "", "")
    _, source, made = answered(target, drafter, CHAIN, nowhere, lambda _: DirectChannel(host), num_micro_batches)
    assert made == plain(target)
    assert host.stats.ahead["right"] > 0
    assert host.stats.ahead["wrong"] > 0
    assert (host.stats.num_misses, source.stats.num_misses) == (0, 0)


class PatientChannel(SocketChannel):
    """Over a socket, to a host that is asked again when it has drafted ahead what it can."""

    def __init__(self, endpoint: Endpoint, host: DraftHost) -> None:
        super().__init__(endpoint)
        self._host = host

    def send(self, frame):
        deadline = time.monotonic() + 20
        while self._host._aheads:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        super().send(frame)


def test_over_sockets_the_host_runs_ahead_by_itself(tiny, learnt):
    target, drafter = tiny("llama"), learnt("llama", "moa-0")
    host, secret = DraftHost({"d": drafter}, CAPACITY, LONG.depth, run_ahead=True), secrets.token_hex(32)
    server = SocketServer(lambda frame: pack(host.handle(*unpack_request(frame))), "127.0.0.1", secret, host.go_on)
    try:
        endpoint = Endpoint("127.0.0.1", server.port, secret, "x")
        _, _, made = answered(target, drafter, CHAIN, endpoint, lambda where: PatientChannel(where, host))
        assert made == plain(target)
        assert host.stats.ahead["right"] > 0
        assert host.stats.ahead["wrong"] > 0
    finally:
        server.close()


def test_trees_that_are_no_chains_are_answered_as_ever(tiny, learnt):
    texts = Texts(tiny("llama"), learnt("llama", "moa-0"))
    shape = FixedShape(type="fixed", branching=(2, 1))
    asked = texts.asked(texts.host, texts.told, texts.kept, shape)
    assert asked == texts.drafted_anew(shape)
    assert not texts.host.go_on()


def test_what_ends_while_it_is_drafted_for_is_let_go(tiny, learnt):
    texts = Texts(tiny("llama"), learnt("llama", "eagle-0"))
    texts.ask()
    assert texts.host.go_on()
    texts.host.close("0")
    work(texts.host)
    assert texts.host.num_sessions == len(PARAMS) - 1
    texts.host.open("0")
    texts.told[0] = 0  # it comes back, in the state that it had
    texts.texts[1].append(5)
    texts.kept = [0] * len(PARAMS)
    assert texts.ask() == texts.drafted_anew()


def test_what_no_turn_is_left_for_does_not_pile_up(tiny, learnt):
    texts = Texts(tiny("llama"), learnt("llama", "moa-0"))
    for _ in range(6):
        for number, chain in enumerate(texts.ask()):
            texts.verify(number, chain, 1)
        living = [ahead for ahead in texts.host._aheads if ahead.sessions]
        assert 1 <= len(texts.host._aheads) == len(living) <= len(PARAMS)
    assert texts.host.stats.ahead_seconds == 0
    assert texts.host.go_on(), "those who wait come first"
    assert {session.num_expanded for session in texts.host._sessions.values()} == {DEPTH + 1}
    assert texts.host.stats.ahead_seconds > 0


def test_whose_drafting_ahead_fails_is_forgotten_and_told_again(tiny, learnt, monkeypatch):
    texts = Texts(tiny("llama"), learnt("llama", "moa-0"))
    texts.ask()
    with monkeypatch.context() as broken:
        broken.setattr(texts.drafter, "step_many", None)
        with pytest.raises(TypeError):
            texts.host.go_on()
    assert texts.host.num_sessions == 0
    assert not texts.host.go_on()
    texts.told = [0] * len(PARAMS)
    assert texts.ask() == texts.drafted_anew()


def test_messages_come_first_and_trouble_in_between_hurts_nobody():
    calls: list[str] = []
    begun, may_go_on = threading.Semaphore(0), threading.Semaphore(0)
    is_trouble = threading.Event()

    def go_on() -> bool:
        if "answer" not in calls:  # a connection is no frame
            return False
        calls.append("ahead")
        begun.release()
        if is_trouble.is_set():
            raise RuntimeError("no more")
        return may_go_on.acquire(timeout=20)

    secret = secrets.token_hex(32)
    server = SocketServer(lambda frame: calls.append("answer") or b"yes", "127.0.0.1", secret, go_on)
    try:
        friend = SocketChannel(Endpoint("127.0.0.1", server.port, secret, "x"))
        friend.send(b"hello")
        assert friend.receive(20) == b"yes"
        for _ in range(3):
            assert begun.acquire(timeout=20), "somebody drafts ahead, with more to do behind it"
            num_calls = len(calls)
            friend.send(b"one")
            friend.send(b"two")
            assert friend.receive(0.05) is None
            may_go_on.release()
            assert (friend.receive(20), friend.receive(20)) == (b"yes", b"yes")
            assert calls[num_calls : num_calls + 2] == ["answer", "answer"]
        assert begun.acquire(timeout=20)
        is_trouble.set()
        may_go_on.release()
        assert begun.acquire(timeout=20), "the next one fails"
        friend.send(b"three")
        assert friend.receive(20) == b"yes"
        assert server.is_alive
    finally:
        may_go_on.release()
        server.close()
    with pytest.raises(UnreachableError):
        friend.receive(5)


def test_a_guess_that_was_drafted_with_another_n_is_not_used():
    guess = Guess((1, 2), (3, 4, 5), (GREEDY, 0, 0))
    assert guess.is_right((1, 2), 3, (GREEDY, 0, 0))
    assert not guess.is_right((1, 2), 3, (GREEDY, 0, 2))
