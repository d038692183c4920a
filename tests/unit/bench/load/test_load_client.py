"""A serving benchmark against a tiny server on loopback: what is sent, what is counted, and what goes wrong."""

import asyncio
import io
import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from moray.bench.load.benchmark import _benchmark, short_name_of
from moray.bench.load.config import LevelConfig, ServeBenchmarkConfig
from moray.bench.load.console import print_load
from moray.bench.load.page import render_load
from moray.bench.specbench import Question
from moray.config import validate
from moray.errors import ConfigError, DataError, UnreachableError

REPOSITORY = Path(__file__).resolve().parents[4]
QUESTIONS = [Question(str(number), "c", (f"question {number}",)) for number in range(3)]
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 2},
}


class Server:
    """Answers every prompt with the same four tokens in three chunks."""

    def __init__(self):
        self.bodies, self.keys, self.under_way, self.peak = [], [], 0, 0

    async def models(self, request):
        if request.headers.get("Authorization") == "Bearer wrong":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if "status" in body:
            return web.json_response({"error": {"message": "as asked for"}}, status=body["status"])
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text, finish in (("", None), ("a", None), ("bc", None), (body.get("last", "d"), "stop")):
            await asyncio.sleep(0.01)
            if text == "break":
                request.transport.close()
                break
            chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        else:
            if not body.get("no_usage"):
                await response.write(b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        self.under_way -= 1
        return response


@asynccontextmanager
async def serving(server, beside=None):
    """Its address; `beside` answers at /beside."""
    app = web.Application()
    for prefix, answering in (("", server), ("/beside", beside)):
        if answering is not None:
            app.router.add_get(f"{prefix}/v1/models", answering.models)
            app.router.add_post(f"{prefix}/v1/chat/completions", answering.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def load(server=None, prepare=lambda name: None, beside=None, **given):
    """Run a benchmark against a server, on a port of its own; `beside` answers the variant "b"."""

    async def run():
        async with serving(server or Server(), beside) as url:
            settings = {"url": url, "questions": "q", "num_requests": 4, "num_warmups": 1} | given
            if beside is not None:
                settings["urls"] = {"b": f"{url}/beside/v1"}
            console = Console(file=io.StringIO(), width=100)
            return await _benchmark(validate(ServeBenchmarkConfig, settings), QUESTIONS, console, prepare)

    return asyncio.run(run())


def test_requests_are_timed_and_counted():
    server = Server()
    result = load(server, levels=[{"max_concurrency": 2}], save_requests=True, rounds=2)
    found = result["levels"][0]["variants"]["default"]
    assert result["model"] == "tiny"
    assert len(server.bodies) == 9  # 2 rounds of 4 and a warm-up
    assert server.peak == 2
    assert (found["completed"], found["total_output_tokens"], found["total_input_tokens"]) == (8, 32, 40)
    assert (found["tau"], found["acceptance_rate"], found["max_concurrent_requests"]) == (2.0, 0.5, 2)
    assert found["ttft_ms"]["median"] >= 20  # the empty chunk is no token
    assert 5 <= found["itl_ms"]["median"] < found["e2e_ms"]["median"]
    request = found["requests"][0][0]
    assert (request["text"], request["finish_reason"], len(request["times"])) == ("abcd", "stop", 3)
    sent = server.bodies[0]
    assert sent["stream_options"] == {"include_usage": True}
    assert "seed" not in sent
    assert "ignore_eos" not in sent
    json.dumps(result, allow_nan=False)


def test_variants_take_turns_and_their_texts_are_compared():
    server = Server()
    variants = {"on": {"last": "d", "speculation": {"enabled": True}}, "off": {"last": "e"}}
    result = load(server, variants=variants, num_requests=1, num_warmups=0, rounds=4)
    assert [body["last"] for body in server.bodies] == list("deeddeed")
    level = result["levels"][0]
    assert list(level["ratios"]) == ["on/off"]
    assert len(level["ratios"]["on/off"]["mean_e2e"]["rounds"]) == 4
    assert (level["equal_texts"]["compared"], level["equal_texts"]["equal"]) == (4, 0)
    out = io.StringIO()
    print_load(result, Console(file=out, width=100))
    assert "Serving Benchmark Result" in out.getvalue()
    assert "equal texts: 0 of 4" in out.getvalue()
    assert "<svg" in render_load(result)


def test_variants_may_be_asked_at_addresses_of_their_own_each_after_it_is_prepared():
    server, beside, prepared = Server(), Server(), []

    def prepare(name):
        prepared.append((name, len(server.bodies), len(beside.bodies)))

    variants = {"a": {}, "b": {}}
    result = load(server, prepare, beside, variants=variants, num_requests=2, num_warmups=0, rounds=2)
    assert (len(server.bodies), len(beside.bodies)) == (4, 4)
    assert prepared == [("a", 0, 0), ("b", 2, 0), ("b", 2, 2), ("a", 2, 4)]
    assert result["levels"][0]["equal_texts"]["equal"] == 4


@pytest.mark.parametrize(
    ("fields", "outcome", "error"),
    [
        ({"status": 429}, "rejected", "429: as asked for"),
        ({"status": 500}, "failed", "500: as asked for"),
        ({"last": "break"}, "failed", ""),
    ],
)
def test_what_goes_wrong_is_counted_once_and_not_tried_again(fields, outcome, error):
    server = Server()
    result = load(server, variants={"default": fields}, num_warmups=0, rounds=1)
    found = result["levels"][0]["variants"]["default"]
    assert (found["completed"], found[outcome], len(server.bodies)) == (0, 4, 4)
    assert any(error in key for key in found["errors"])


def test_levels_are_named_by_their_load_and_variants_by_their_ratio():
    levels = [{"max_concurrency": 1}, {"max_concurrency": 3}]
    result = load(levels=levels, variants={"on": {"stop": ["x"]}, "off": {}}, baseline="off")
    out = io.StringIO()
    print_load(result, Console(file=out, width=140))
    overview = out.getvalue()[out.getvalue().rindex("concurrency") :]
    rows = [line.split() for line in overview.splitlines() if " on " in line or " off " in line]
    assert [row[:2] for row in rows] == [["1", "on"], ["1", "off"], ["3", "on"], ["3", "off"]]
    ratios = [row[4] for row in rows]
    assert ratios[1] == ratios[3] == "-"
    found = [level["ratios"]["on/off"]["output_throughput"]["ratio"] for level in result["levels"]]
    assert [float(ratios[place].rstrip("x")) for place in (0, 2)] == pytest.approx(found, rel=0.01)
    assert short_name_of(LevelConfig(request_rate=5.0, max_concurrency=8)) == "5/s, 8"
    assert short_name_of(LevelConfig(times_first=2.0)) == "2 x first"


def test_a_rate_may_be_a_multiple_of_what_the_first_level_answered():
    server, levels = Server(), [{"max_concurrency": 1}, {"times_first": 2.0, "num_requests": 7}]
    result = load(server, levels=levels, rounds=1, num_warmups=0)
    first, second = result["levels"]
    assert second["request_rate"] == 2 * first["variants"]["default"]["request_throughput"]
    assert (len(server.bodies), second["variants"]["default"]["completed"]) == (4 + 7, 7)
    out = io.StringIO()
    print_load(result, Console(file=out, width=200))
    assert "(2 times what the first level answered)" in out.getvalue()
    with pytest.raises(DataError, match=r"levels.1.times_first is 2, .* answered no request"):
        load(levels=levels, variants={"default": {"status": 429}}, num_warmups=0)
    for wrong in ([{"times_first": 2}], [{}, {"times_first": 2, "request_rate": 1}]):
        with pytest.raises(ConfigError, match="times_first"):
            load(levels=wrong)


def test_who_is_refused_is_in_no_latency_and_no_failure():
    """Of two variants one is refused: what it says of latencies is nothing, and how soon it was refused."""
    result = load(variants={"in": {}, "out": {"status": 429}}, rounds=1, num_warmups=0, levels=[{}, {}])
    taken, refused = (result["levels"][0]["variants"][name] for name in ("in", "out"))
    assert (refused["completed"], refused["rejected"], refused["failed"]) == (0, 4, 0)
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert taken[key]["median"] > 0
        assert refused[key]["median"] is None
    assert refused["rejected_ms"]["median"] > 0
    assert taken["rejected_ms"]["median"] is None
    out = io.StringIO()
    print_load(result, Console(file=out, width=200))
    overview = out.getvalue()[out.getvalue().rindex("concurrency") :]
    assert re.search(r"unlimited +out +0 +4 +0 +- ", overview), overview
    assert "failed" not in overview, "nothing failed"


class Interrupting(Server):
    """Ctrl-C comes with a certain request, to the process that is asked for."""

    def __init__(self, at):
        super().__init__()
        self.at, self.pid = at, os.getpid()

    async def chat(self, request):
        if len(self.bodies) + 1 == self.at:
            os.kill(self.pid, signal.SIGINT)
        return await super().chat(request)


@pytest.fixture
def _heard():
    """What a shell runs in the background is deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
def test_an_interrupt_leaves_the_levels_that_were_measured():
    levels = [{"max_concurrency": count} for count in (1, 2, 3)]
    result = load(Interrupting(10), levels=levels, rounds=1)
    assert [level["max_concurrency"] for level in result["levels"]] == [1]
    assert result["interrupted"]
    assert result["notes"][0] == "interrupted: 1 of 3 levels were measured"
    assert "<svg" in render_load(result)
    with pytest.raises(KeyboardInterrupt):
        load(Interrupting(2), levels=levels, rounds=1)


@pytest.mark.usefixtures("_heard")
def test_the_interrupted_command_prints_and_writes_what_it_has_and_no_traceback(tmp_path):
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")
    settings = {"questions": str(tmp_path / "questions.jsonl"), "num_requests": 4, "num_warmups": 1, "rounds": 1}
    (tmp_path / "load.yaml").write_text(json.dumps(settings | {"levels": [{}, {}]}))
    server = Interrupting(7)

    async def run():
        async with serving(server) as url:
            words = f"serve {tmp_path / 'load.yaml'} --url {url} --json {tmp_path / 'r.json'}"
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pipelines.benchmark", *words.split()),
                cwd=REPOSITORY,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            server.pid = process.pid
            out, err = await process.communicate()
            return process.returncode, out.decode(), err.decode()

    code, out, err = asyncio.run(run())
    assert (code, err) == (130, "\ninterrupted: the same command starts again\n")
    assert "interrupted: 1 of 2 levels were measured" in out
    assert json.loads((tmp_path / "r.json").read_text())["levels"][0]["variants"]["default"]["completed"] == 4


def test_a_server_that_does_not_count():
    result = load(variants={"default": {"no_usage": True}}, rounds=1)
    found = result["levels"][0]["variants"]["default"]
    assert (found["total_output_tokens"], found["tau"]) == (12, None)
    assert any("does not count tokens" in note for note in result["notes"])


def test_a_warm_up_that_fails_ends_it():
    with pytest.raises(DataError, match=r"warm-up of variant 'bad' failed .*400: as asked for"):
        load(variants={"bad": {"status": 400}})


def test_nobody_there_is_said_with_the_address():
    with pytest.raises(UnreachableError, match=r"no answer from 'http://127.0.0.1:9': .*--url"):
        load(url="http://127.0.0.1:9")


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(monkeypatch):
    monkeypatch.setenv("OUR_KEY", "sesame")
    server = Server()
    result = load(server, api_key_env="OUR_KEY", rounds=1)
    assert set(server.keys) == {"Bearer sesame"}
    assert "sesame" not in json.dumps(result)
    monkeypatch.setenv("OUR_KEY", "wrong")
    with pytest.raises(ConfigError, match="401; the key in OUR_KEY is not accepted"):
        load(api_key_env="OUR_KEY")
    monkeypatch.delenv("OUR_KEY")
    with pytest.raises(ConfigError, match="api_key_env is 'OUR_KEY', which is not in the environment"):
        load(api_key_env="OUR_KEY")
