"""The application on Ray Serve: every client gets the target's own text, at any load and whichever process dies."""

import asyncio
import threading
import time
from collections import Counter

import httpx
import openai
import pytest
from served_app import MODEL, NUM_QUESTIONS, Question, ServedApp, questions

from moray.errors import ConfigError

pytestmark = pytest.mark.slow
AT_ONCE = 16


@pytest.mark.timeout(600)
def test_texts_are_the_target_s_own_at_any_number_of_replicas(app, expected):
    """Greedy and sampled, streamed, sixteen at a time; a drafter and a target are added under way."""
    asked = questions(NUM_QUESTIONS)
    for num_replicas in ({}, {"Target": 2, "Drafter": 2}):
        app.deploy(num_replicas)
        answers = app.request_drafts(asked, AT_ONCE)
        assert [text for text, _ in answers] == expected, num_replicas
        assert sum(num_drafted for _, num_drafted in answers) > 50, "drafts were accepted"
    alone = app.request_drafts(asked[:12], 1)
    assert [text for text, _ in alone] == expected[:12], "sampling with a seed gives the same text at any concurrency"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("Target", "Drafter"), id="both"),
        pytest.param(("Drafter",), marks=pytest.mark.soak, id="drafters"),
        pytest.param(("Target",), marks=pytest.mark.soak, id="targets"),
    ],
)
def test_a_kill_of_any_process_loses_nothing(app, expected, victims):
    """kill -9 of replicas in a loop while answers are streamed; now and then of all drafters at once."""
    app.deploy({"Target": 2, "Drafter": 2})
    asked, killed, is_over = questions(NUM_QUESTIONS), Counter(), threading.Event()

    def kill() -> None:
        while not is_over.wait(1.0):
            victim = victims[killed.total() % len(victims)]
            if victim == "Target" and len(app.ready("Target")) < 2:
                continue  # no request could end if targets died faster than they start
            killed[victim] += app.kill(victim, everyone=victim == "Drafter" and killed[victim] % 3 == 0)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        deadline = time.monotonic() + 200
        while any(killed[victim] < 2 for victim in victims):
            assert time.monotonic() < deadline, killed
            assert [text for text, _ in app.request_drafts(asked, AT_ONCE)] == expected
    finally:
        is_over.set()
        thread.join()
    _wait_for_drafts(app, asked)


@pytest.mark.timeout(300)
def test_a_killed_target_holds_no_places(app):
    """Ray does not end its own calls of a process that was killed, but gRPC does: what its sequences held of a drafter
    is free soon."""
    app.deploy({"Target": 2})
    asked = [
        Question("one two three", 0.0, number, 200) for number in range(2 * AT_ONCE)
    ]  # a quarter is not the pool's
    answers: list[tuple[str, int]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.extend(app.request_drafts(asked, len(asked)))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while app.describe("Drafter")["num_leases"] <= AT_ONCE:  # with more than it takes both targets hold some
            assert time.monotonic() < deadline
            time.sleep(0.01)
        app.kill("Target")
    finally:
        is_over.set()
        thread.join()
    assert len({text for text, _ in answers}) == 1
    app.wait_until_idle(5)


def _wait_for_drafts(app: ServedApp, asked: list[Question]) -> None:
    """Speculation comes back by itself, in the pool."""
    deadline = time.monotonic() + 60
    while not sum(num_drafted for _, num_drafted in app.request_drafts(asked[:3], 1)):
        assert time.monotonic() < deadline
        time.sleep(1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.soak)], ids=["100", "500"])
def test_clients_that_leave_hold_nothing(app, rounds):
    """Their places are free again within a second, in both pools."""
    app.deploy({})
    app.wait_until_idle(30)
    long = Question("one two three", 0.0, 0, 200)

    async def leave(count: int) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with app.client() as client:

            async def one(number: int) -> None:
                async with places:
                    task = asyncio.create_task(app.ask(client, long))
                    await asyncio.sleep(0.02 + number % 7 * 0.02)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            await asyncio.gather(*(one(number) for number in range(count)))

    for _ in range(rounds):
        asyncio.run(leave(100))
        app.wait_until_idle(1.0)


@pytest.mark.timeout(300)
def test_a_full_server_says_when_to_retry(ray_session, tiny_target, app):
    """More than run and wait at a time are refused with 429 at once, and those taken in are answered."""
    asked = [Question("one two three", 0.0, number, 400) for number in range(240)]

    async def run() -> list[object]:
        async with app.client() as client:
            return await asyncio.gather(*(app.ask(client, question) for question in asked), return_exceptions=True)

    answers = asyncio.run(run())
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert refused, "there are 16 places, and 64 may wait"
    assert all(isinstance(answer, openai.RateLimitError) for answer in refused), refused[:3]
    assert all(int(answer.response.headers["retry-after"]) >= 1 for answer in refused)
    taken = {answer[0] for answer in answers if isinstance(answer, tuple)}
    assert len(taken) == 1
    app.wait_until_idle(5)


def test_what_is_sent_is_bounded_and_what_is_answered_is_not(app):
    """Through Serve's proxy as well: errors in OpenAI's shape, and a whole answer beyond gRPC's usual 4 MiB."""
    app.deploy({})
    url = f"http://127.0.0.1:{app.port}"
    kinds = {
        b"{": 400,
        b"[" * 10_000: 400,
        b'{"model": "tiny", "prompt": "' + b"x" * 3_000_000 + b'"}': 413,
        b'{"model": "tiny", "prompt": "x", "temperature": -1}': 400,
        b'{"model": "another", "prompt": "x"}': 404,
    }
    for body, status in kinds.items():
        answer = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
    assert httpx.get(f"{url}/openapi.json").json()["paths"]
    chat = [{"role": "user", "content": "x"}]
    large = {"model": MODEL, "messages": chat, "n": 8, "max_tokens": 450, "logprobs": True, "top_logprobs": 20}
    answer = httpx.post(f"{url}/v1/chat/completions", json=large | {"ignore_eos": True, "seed": 1}, timeout=120)
    assert answer.status_code == 200
    assert len(answer.content) > 4 << 20
    assert answer.json()["usage"]["completion_tokens"] == 8 * 450
    app.wait_until_idle(5)


@pytest.mark.timeout(300)
def test_a_killed_gateway_leaves_nothing_running(app):
    """Its clients are gone, and so is what they were being answered, long before the answers would have ended."""
    slow = {"max_num_seqs": 16, "kv_cache_tokens": 4096, "synthetic": {"verify": {"ms": 500}}}
    app.deploy({}, engine=slow)
    app.wait_until_idle(30)
    asked = [Question("one two three", 0.0, number, 200) for number in range(AT_ONCE)]
    failures: list[Exception] = []

    def ask() -> None:
        try:
            app.request_drafts(asked, AT_ONCE)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while app.describe("Target").num_running < AT_ONCE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        app.kill("Gateway")
        app.wait_until_idle(8.0)  # the answers would take 25 s
    finally:
        thread.join()
    assert failures, "the gateway was killed after the last answer"


@pytest.mark.timeout(300)
def test_a_device_goes_on_at_the_same_token_after_any_kill(app, tiny_target):
    """kill -9 of the target, and then of the gateway: the device opens its session again when they are back."""
    from moray.decoding.params import SamplingParams
    from moray.decoding.plain import PlainDecoder
    from moray.decoding.request import Request
    from moray.drafters.configs import NgramConfig
    from moray.edge.config import EdgeConfig
    from moray.edge.device.client import EdgeClient
    from moray.edge.device.drafting import DeviceDrafter
    from moray.edge.device.events import VerifiedTokens
    from moray.edge.device.transport import WebSocketLink
    from moray.edge.messages import Hello
    from moray.targets.head import TargetHead
    from moray.targets.model import Target
    from moray.targets.spec import TargetConfig
    from moray.text import ChatTokenizer

    app.deploy({}, edge={"drafters": ["lookup"]}, engine={"max_num_seqs": 16, "kv_cache_tokens": 4096})
    target = Target.load(TargetConfig(model=str(tiny_target), device="cpu"))
    config = NgramConfig(type="ngram")
    hello = Hello(
        target=target.spec.fingerprint,
        text=ChatTokenizer.load(str(tiny_target)).fingerprint,
        drafter="lookup",
        drafter_fingerprint="",
    )
    client = EdgeClient(
        DeviceDrafter(config.build(TargetHead.of(target)), "lookup", 256),
        hello,
        lambda: WebSocketLink(f"ws://127.0.0.1:{app.port}/v1/edge"),
        EdgeConfig(retry_seconds=0.5, give_up_seconds=120),
    )
    prompt, victims, text = [3, 4, 5] * 10, ["Target", "Gateway"], []
    wanted = PlainDecoder(target, 256).generate(prompt, SamplingParams(), 120, ()).tokens
    for event in client.answer(Request(prompt=tuple(prompt), max_new_tokens=120, ignore_eos=True)):
        if isinstance(event, VerifiedTokens):
            text += event.tokens
            if victims and len(text) >= 120 - 50 * len(victims):
                assert app.kill(victims.pop(0), everyone=True)
    assert text == wanted
    assert client.stats.num_cuts >= 2
    assert client.stats.num_reopened >= 1


def test_a_benchmark_does_not_end_a_serve_that_runs(app):
    from ray import serve

    from moray.cluster.own_serve import own_serve

    running = set(serve.status().applications)
    with pytest.raises(ConfigError, match="Serve runs on this Ray already"), own_serve():
        pass
    assert running
    assert set(serve.status().applications) == running
