"""A device that drafts and a server that verifies: the text is the target's own, whatever was cut when."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from edge_server import FINGERPRINT, LocalServer
from in_turn import in_turn
from shape_checks import unchecked
from side_by_side import ADAPTIVE, COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build, overfit
from tiny_targets import MAX_POSITIONS, TinyTarget, load_target

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.engine import Engine
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.edge.config import EdgeConfig
from moray.edge.device.client import EdgeClient, cut_draft
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import DraftedTokens, Finished, LinkChanged, LocalText, Retracted, VerifiedTokens
from moray.edge.device.local_spans import LocalSpans
from moray.edge.device.private import Redactor
from moray.edge.messages import Hello, Open, Verify, decode_up
from moray.errors import UnreachableError
from moray.trees.shapes import ChainShape

NEW, EOS, CAPACITY = 24, (5, 17), 400
CHAIN = ChainShape(type="chain", depth=3)
CONFIG = EdgeConfig(tree=CHAIN, codec="float32", retry_seconds=0.001, max_offline_tokens=8)


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("edge"))


@pytest.fixture(scope="module")
def drafter_of(tiny) -> Callable[[str], Drafter]:
    """Drafters that have learnt a text of the target's, so that some of their drafts are right."""

    @cache
    def make(variant: str) -> Drafter:
        drafter = build(tiny, VARIANTS[variant])
        return overfit(tiny, drafter, tiny.hugging_face(tiny.prompt(), 40), 6)

    return make


def server_of(tiny: TinyTarget, drafter: Drafter, batch: int = 2) -> LocalServer:
    config = EngineConfig(max_num_seqs=batch, kv_cache_tokens=batch * 512, max_model_len=CAPACITY, tree=CHAIN)

    def engine() -> Engine:
        return Engine(tiny.target, config, EOS, paced={"d": drafter}, max_offered_nodes=32)

    return LocalServer(engine, {"d": FINGERPRINT})


def client_of(tiny: TinyTarget, drafter: Drafter, server: LocalServer, config: EdgeConfig = CONFIG) -> EdgeClient:
    hello = Hello(target=tiny.target.spec.fingerprint, text="text", drafter="d", drafter_fingerprint=FINGERPRINT)
    return EdgeClient(DeviceDrafter(drafter, "d", CAPACITY), hello, server.dial, config, EOS)


def text_of(client: EdgeClient, request: Request) -> tuple[list[int], str]:
    """The verified text; checks that what is shown is consistent at every event."""
    verified: list[int] = []
    shown: list[int] = []
    for event in client.answer(request):
        if isinstance(event, VerifiedTokens):
            assert event.index == len(verified), "a gap, or a token twice"
            verified += event.tokens
            assert shown[: len(verified)] == verified[: len(shown)], "a wrong token was not retracted"
            shown = verified + shown[len(verified) :]
        elif isinstance(event, DraftedTokens):
            assert event.index == len(shown)
            shown += event.tokens
        elif isinstance(event, Retracted):
            assert len(verified) <= event.index < len(shown)
            shown = shown[: event.index]
        elif isinstance(event, Finished):
            assert shown == verified
            return verified, event.finish_reason
    raise AssertionError("the answer never ended")


def expected(tiny: TinyTarget, prompt: list[int], params) -> tuple[list[int], str]:
    made = PlainDecoder(tiny.target, MAX_POSITIONS).generate(prompt, params, NEW, EOS, sequence=3)
    return made.tokens, made.finish_reason


def request_of(prompt: list[int], params=GREEDY) -> Request:
    return Request(prompt=tuple(prompt), params=params, max_new_tokens=NEW, sequence=3)


HOW = ("chain", "tree", "adaptive", "adaptive tree", "in flight 2", "in flight 2, fast server")


@in_turn(("variant", "how"), [*VARIANTS], HOW, whole=["moa-1", "ngram-0"])
def test_the_text_is_the_target_s(tiny, drafter_of, variant, how):
    drafter = drafter_of(variant)
    config = {
        "chain": CONFIG,
        "tree": CONFIG.model_copy(update={"tree": SHAPES["fixed"]}),
        "adaptive": CONFIG.model_copy(update={"tree": ADAPTIVE["adaptive chain"]}),
        "adaptive tree": CONFIG.model_copy(update={"tree": ADAPTIVE["adaptive tree"]}),
        "in flight 2": CONFIG.model_copy(update={"in_flight": 2}),
    }[how.partition(",")[0]]
    server = server_of(tiny, drafter)
    server.is_fast = "fast" in how
    client = client_of(tiny, drafter, server, config)
    for seed, params in ((0, GREEDY), (1, COUPLED)):
        prompt = tiny.prompt(seed, 300 if seed else 9)
        assert text_of(client, request_of(prompt, params)) == expected(tiny, prompt, params)
    assert not server.backend.engine.is_busy
    assert len(server.links) == 1, "one connection serves one answer after the other"
    client.close()
    assert not server.server.sessions


@in_turn(("variant", "in_flight"), [*VARIANTS], [1, 2], whole=["moa-1"])
def test_cuts_change_nothing(tiny, drafter_of, variant, in_flight):
    """Connections break before a message is sent, after the server has handled it, and before an answer arrives; now
    and then the server restarts as well, and loses the session."""
    drafter = drafter_of(variant)
    server = server_of(tiny, drafter)
    server.is_fast = in_flight == 2
    client = client_of(tiny, drafter, server, CONFIG.model_copy(update={"in_flight": in_flight}))
    prompt = tiny.prompt()
    wanted = expected(tiny, prompt, GREEDY)
    for seed in range(2):
        chance = random.Random(seed)
        tries = [0]

        def cut(event: str, chance=chance) -> bool:
            return chance.random() < 0.08

        def is_reachable(chance=chance, tries=tries) -> bool:
            tries[0] += 1
            if chance.random() < 0.15:
                server.restart()
            return tries[0] % 3 != 0

        server.cut, server.is_reachable = cut, is_reachable
        assert text_of(client, request_of(prompt)) == wanted
        assert client.stats.num_cuts


def test_closing_the_answer_cancels_it(tiny, drafter_of):
    server = server_of(tiny, drafter_of("moa-0"))
    events = client_of(tiny, drafter_of("moa-0"), server).answer(request_of(tiny.prompt()))
    while not isinstance(next(events), VerifiedTokens):
        pass
    assert server.server.sessions
    events.close()
    assert not server.server.sessions
    assert server.backend.engine.num_running == 0


def test_a_full_server_is_asked_again_after_a_pause(tiny, drafter_of):
    server = server_of(tiny, drafter_of("moa-0"))
    limits = server.server.limits
    server.server.limits = replace(limits, max_sessions=0)
    client = client_of(tiny, drafter_of("moa-0"), server)
    reasons = []
    for event in client.answer(request_of(tiny.prompt())):
        if isinstance(event, LinkChanged) and event.reason:
            reasons.append(event.reason)
            server.server.limits = limits
        if isinstance(event, Finished):
            break
    assert reasons == ["all sessions are taken: try again later"]
    assert len(server.links) == 2
    server.server.limits = replace(limits, max_sessions=0)
    patient = client_of(tiny, drafter_of("moa-0"), server, CONFIG.model_copy(update={"give_up_seconds": 0.5}))
    with pytest.raises(UnreachableError, match=r"no server for 0.5 s: all sessions"):
        text_of(patient, request_of(tiny.prompt()))
    assert len(server.links) <= 4, "a pause lies between two attempts"


def test_text_between_marks_is_written_by_the_drafter_and_crosses_nothing(tiny, drafter_of):
    """The sixth token of the target's text is made the opening mark, and one that the drafter then writes the closing
    one."""
    drafter, prompt = drafter_of("moa-0"), tiny.prompt()
    text, _ = expected(tiny, prompt, COUPLED)
    letters = {90: "[", 91: "P", 92: "1", 93: "]", 94: "</private>"}
    letters |= {token: chr(0x400 + token) for token in range(90)} | {text[5]: "<private>"}
    assert text.count(text[5]) == 1

    def decode(ids, **_) -> str:
        return "".join(letters.get(token, "?") for token in ids)

    def encode(words: str) -> list[int]:
        assert words == "[P1]</private>"
        return [90, 91, 92, 93, 94]

    def run() -> tuple[list, Redactor, LocalServer]:
        server, redactor = server_of(tiny, drafter), Redactor()
        client = client_of(tiny, drafter, server)
        spans = LocalSpans(client, client._drafter, encode, decode, redactor, limit, EOS)
        events = list(spans.answer(request_of(prompt, COUPLED)))
        assert client.stats.num_tokens == sum(len(e.tokens) for e in events if isinstance(e, VerifiedTokens))
        return events, redactor, server

    length, limit = 4, 4
    for _ in range(2):  # ended by the limit, then by the mark
        events, redactor, server = run()
        (local,) = (event for event in events if isinstance(event, LocalText))
        written = local.text.removesuffix("</private>")
        known = "".join(decode(e.tokens) for e in events[: events.index(local)] if isinstance(e, VerifiedTokens))
        whole = known.partition("<private>")[2] + written
        assert len(written) == length
        assert redactor.restore("<[P1]>") == f"<{whole}>"
        stands_for = [*text[:6], 90, 91, 92, 93, 94]
        plain = PlainDecoder(tiny.target, MAX_POSITIONS)
        after = plain.generate([*prompt, *stands_for], COUPLED, NEW - len(stands_for), EOS, sequence=3).tokens
        shown = [token for event in events for token in (event.tokens if isinstance(event, VerifiedTokens) else ())]
        assert shown[-len(after) :] == after, "the target goes on from the placeholder"
        said = [decode_up(frame) for frame in server.frames if isinstance(frame, str)]
        opened = [message for message in said if isinstance(message, Open)]
        assert [*opened[-1].request.generated] == stands_for
        ids = [token for letter in written for token, own in letters.items() if own == letter]
        assert [*map(decode, ([token] for token in ids))] == [*written]
        for message in said:  # before the mark was verified, too: no draft goes past it
            path = message.tokens if isinstance(message, Verify) else ()
            assert text[5] not in path[:-1]
        later = said[said.index(opened[-1]) :]
        sent = {token for message in later if isinstance(message, Verify) for token in message.tokens}
        assert not {*ids} <= sent | {*stands_for}, "what was written alone is not sent"
        if length == limit:
            length = next(place for place in range(1, limit) if ids[place] not in ids[:place])
            letters[ids[length]] = "</private>"


def test_a_draft_is_cut_below_the_nodes_that_end_it():
    def ends(tokens) -> bool:
        return tokens[-1] == 9

    assert cut_draft([1], [2, 9, 3, 4], (), ends) == ([2, 9], ())
    assert cut_draft([1, 9], [2, 3], (), ends) == ([2, 3], ())
    #  2 -> 9 -> 4, 2 -> 3 -> 5 -> 9 -> 6
    tokens, parents = [2, 9, 3, 4, 5, 9, 6], (-1, 0, 0, 1, 2, 4, 5)
    assert cut_draft([], tokens, parents, ends) == ([2, 9, 3, 5, 9], (-1, 0, 0, 2, 3))
    assert cut_draft([], [9, 1], (), ends) == ([9], ())
