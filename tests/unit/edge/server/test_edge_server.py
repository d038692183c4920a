"""The server's part of the protocol: it refuses strangers, damaged messages and too many sessions, and others go on."""

import random

import pytest

from moray.decoding.remote.frames import pack_frame, unpack_frame
from moray.decoding.request import Request
from moray.edge.messages import (
    Hello,
    Open,
    Refused,
    Resume,
    Resumed,
    Verified,
    Verify,
    Welcome,
    decode_down,
    decode_up,
    encode_up,
)
from moray.edge.server.replies import Reply
from moray.edge.server.server import Backend, EdgeServer, Limits, Served
from moray.edge.server.session import MAX_UNRECEIVED_BYTES, ResumeTokens, ServerSession, SessionEndedError
from moray.errors import DataError

HELLO = Hello(target="T", text="X", drafter="d", drafter_fingerprint="F")
OPEN = Open(request=Request(prompt=(1, 2, 3), max_new_tokens=5, drafter="d"))


class Recorder(Backend):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.opened, self.offered, self.cancelled, self.refused = [], [], [], []
        self.num_resumed = 0

    def open(self, session, message, codec) -> None:
        self.opened.append(session.name)

    def offer(self, session, verify) -> None:
        self.offered.append((session.name, verify.seq))

    def cancel(self, session) -> None:
        self.cancelled.append(session.name)

    def note_resumed(self) -> None:
        self.num_resumed += 1

    def note_refused(self, code) -> None:
        self.refused.append(code)


class Device:
    """A connection, and what came over it."""

    def __init__(self, server: EdgeServer, owner: str = "0") -> None:
        self.frames = []
        self.connection = server.connect(owner, self.frames.append)

    def say(self, *messages):
        """Send messages; the last answer, if any."""
        before = len(self.frames)
        for message in messages:
            self.connection.receive(message if isinstance(message, str | bytes) else encode_up(message))
        return decode_down(unpack_frame(self.frames[-1])[0]) if len(self.frames) > before else None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def server_of(**limits) -> tuple[EdgeServer, Recorder, Clock]:
    backend, clock = Recorder(), Clock()
    served = Served("T", "X", {"d": "F"}, codecs=("bfloat16", "int8"))
    return EdgeServer(served, Limits(100, 9, **limits), backend, clock), backend, clock


def reply(index: int, size: int = 0) -> Reply:
    return Reply(index, (1,), 0, False, bytes(size) or pack_frame(Verified(index=index)))


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"versions": (7,)}, "version", "speaks version 2"),
        ({"target": "other"}, "target", "this server's is T"),
        ({"text": "other"}, "text", "this server's are X"),
        ({"drafter": "e"}, "drafter", "there are: d"),
        ({"drafter_fingerprint": "other"}, "drafter", "copy the server's"),
        ({"codec": "int4"}, "codec", "accepts bfloat16, int8"),
    ],
)
def test_a_device_that_does_not_match_is_refused_with_the_reason(change, code, said):
    server, backend, _ = server_of()
    device = Device(server)
    refused = device.say(HELLO.model_copy(update=change))
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert said in refused.message
    assert device.connection.is_closed
    assert backend.refused == [code]
    assert not server.sessions
    assert not backend.opened


@pytest.mark.parametrize(
    "messages",
    [
        (OPEN,),
        (HELLO, HELLO),
        (HELLO, OPEN, OPEN),
        (HELLO, Open(request=OPEN.request.model_copy(update={"drafter": "e"}))),
        (HELLO, Open(request=OPEN.request.model_copy(update={"logprobs": 1}))),
        (HELLO, OPEN, Verify(seq=2, at=3)),
        (HELLO, OPEN, Resume(session="s", token="t")),
        (HELLO, "{}"),
        (HELLO, '{"type": "verify", "seq": 0, "at": 1}'),
        (HELLO, "x" * (1 << 21)),
        (HELLO, "[" * 100_000),
    ],
)
def test_a_message_out_of_order_or_damaged_ends_the_connection_and_its_session(messages):
    server, backend, _ = server_of()
    device = Device(server)
    refused = device.say(*messages)
    assert isinstance(refused, Refused)
    assert refused.code == "bad_message"
    assert not server.sessions
    assert backend.cancelled == backend.opened or len(backend.cancelled) == 1


def test_a_session_goes_on_over_another_connection_with_the_same_key_alone():
    server, backend, _ = server_of()
    first = Device(server, owner="1")
    welcome = first.say(HELLO)
    assert isinstance(welcome, Welcome)
    first.say(OPEN, Verify(seq=1, at=3))
    session = server.sessions[welcome.session]
    session.add(reply(1))
    session.add(reply(2))
    first.connection.lost()
    session.add(reply(3))
    resume = Resume(session=welcome.session, token=welcome.resume_token, received=1)
    for owner, token in (("2", welcome.resume_token), ("1", welcome.resume_token[:-4] + "AAA="), ("1", "é")):
        thief = Device(server, owner)
        refused = thief.say(HELLO, resume.model_copy(update={"token": token}))
        assert isinstance(refused, Refused)
        assert refused.code == "token"
    again = Device(server, owner="1")
    again.say(HELLO, resume)
    assert decode_down(unpack_frame(again.frames[1])[0]) == Resumed(last_seq=1)
    assert len(again.frames) == 4, "what was not received follows"
    again.say(Verify(seq=1, at=3), Verify(seq=2, at=4, received=3))
    assert backend.offered == [(welcome.session, 1), (welcome.session, 2)], "each is verified once"
    assert (backend.num_resumed, backend.refused) == (1, ["token"] * 3)
    assert session.after(3) == []


def test_an_idle_session_is_dropped_and_a_resumption_is_told_to_open_again():
    server, backend, clock = server_of(idle_seconds=10)
    device = Device(server)
    welcome = device.say(HELLO)
    device.say(OPEN)
    device.connection.lost()
    clock.now = 11
    server.sweep()
    assert backend.cancelled == [welcome.session]
    refused = Device(server).say(HELLO, Resume(session=welcome.session, token=welcome.resume_token))
    assert isinstance(refused, Refused)
    assert refused.code == "session"


def test_a_connected_device_that_waits_for_the_server_is_not_idle():
    server, backend, clock = server_of(idle_seconds=10)
    device = Device(server)
    welcome = device.say(HELLO)
    device.say(OPEN)
    clock.now = 100
    server.sweep()
    assert welcome.session in server.sessions
    server.sessions[welcome.session].add(reply(1))
    server.sweep()
    assert backend.cancelled == [welcome.session]
    assert device.connection.is_idle


def test_sessions_are_limited_in_all_and_per_key():
    server, _, _ = server_of(max_sessions=3, max_sessions_per_key=2)
    answers = [Device(server, owner).say(HELLO) for owner in "00011"]
    assert [type(answer) for answer in answers] == [Welcome, Welcome, Refused, Welcome, Refused]
    assert answers[2].code == "full"
    assert answers[2].retry_ms


def test_what_a_device_never_takes_is_bounded():
    session = ServerSession("s", "0")
    for index in range(1, 40):
        session.add(reply(index, MAX_UNRECEIVED_BYTES // 10))
    assert sum(map(len, session.after(30))) <= MAX_UNRECEIVED_BYTES
    with pytest.raises(SessionEndedError, match="open the session again"):
        session.after(5)


def test_a_resume_token_expires():
    clock = Clock()
    tokens = ResumeTokens(b"secret", clock)
    token = tokens.sign("s", "3", 10)
    assert tokens.check(token, "s", "3")
    assert not tokens.check(token, "t", "3")
    assert not ResumeTokens(b"other", clock).check(token, "s", "3")
    clock.now = 10
    assert not tokens.check(token, "s", "3")


def test_ten_thousand_fuzzed_messages_end_in_a_refusal_and_hurt_no_other_session():
    server, backend, _ = server_of(max_sessions=4)
    neighbour = Device(server, owner="9")
    welcome = neighbour.say(HELLO)
    neighbour.say(OPEN)
    chance = random.Random(0)
    valid = [
        encode_up(m)
        for m in (HELLO, OPEN, Verify(seq=1, at=3, tokens=(1, 2), parents=(-1, 0)), Resume(session="s", token="t"))
    ]
    device = Device(server)
    for _ in range(10_000):
        if device.connection.is_closed:
            device.connection.lost()
            device = Device(server)
            if chance.random() < 0.5:
                device.say(HELLO)
        text = bytearray(chance.choice(valid).encode())
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(text))
            how = chance.randrange(3)
            if how == 0:
                text[place] = chance.randrange(256)
            elif how == 1:
                del text[place : place + chance.randint(1, 9)]
                text = text or bytearray(b"{")
            else:
                text[place:place] = chance.choice([b'"', b"}", b"-", b"9" * 30, b"null", b"\xff"])
        device.say(bytes(text))
    assert neighbour.say(Verify(seq=1, at=3)) is None
    assert backend.offered[-1] == (welcome.session, 1)


def test_the_error_of_a_damaged_message_does_not_quote_all_of_it():
    with pytest.raises(DataError) as caught:
        decode_up('{"type": "hello", "target": ' + "9" * 5000 + "}")
    assert len(str(caught.value)) < 300
