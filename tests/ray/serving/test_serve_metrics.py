"""An application on Ray Serve exports what its clients were told: tokens, accepted drafts, endings, status codes."""

import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve.metrics import series
from serve.metrics.series import Series

APPLICATION = "metrics-test"
NUM_ANSWERED = 6
NUM_AT_ONCE = 16
pytestmark = pytest.mark.slow
SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def url(ray_session, tiny_target, other_target):
    """Where a tiny target is served that knows one drafter's drafts to be right, and another's to be wrong."""
    from ray import serve

    from serve.app import build_app

    port = free_port()
    app = build_app(
        {
            "target": {"model": str(tiny_target), "device": "cpu"},
            "drafters": {
                "same": {"type": "pretrained", "model": str(tiny_target)},
                "other": {"type": "pretrained", "model": str(other_target)},
            },
            "engine": {"max_num_seqs": 2, "kv_cache_tokens": 2048, "tree": {"type": "chain", "depth": 3}},
            "api": {"model_name": "tiny"},
            "draft_timeout_ms": 2000,
            "max_waiting": 1,
            "threads": 1,
        }
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app, name=APPLICATION, route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


class Told:
    """What clients were told, in sums."""

    def __init__(self, url: str) -> None:
        self.usage: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self._client = httpx.Client(base_url=url, timeout=60)

    def ask(self, number: int, **fields) -> str:
        """Ask for a completion; returns its text, or what stands in its place."""
        body = {"model": "tiny", "prompt": f"number {number} ", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        response = self._client.post("/v1/completions", json=body | fields)
        self.statuses[str(response.status_code)] += 1
        if response.status_code != 200:
            return response.text
        usage, (choice,) = response.json()["usage"], response.json()["choices"]
        details = usage.pop("completion_tokens_details")
        self.usage.update(usage | details)
        self.finished[choice["finish_reason"]] += 1
        return choice["text"]


@pytest.fixture(scope="module")
def told(url):
    """Requests of all kinds: answered, refused for what they ask for, and refused at capacity."""
    told = Told(url)
    for number in range(NUM_ANSWERED):
        text = told.ask(number, speculation={"drafter": ("same", "other")[number % 2]})
    told.ask(number, stop=text[8])
    told.ask(0, model="another")
    told.ask(0, temperature=-1)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(pool.map(lambda number: told.ask(number, max_tokens=100), range(NUM_AT_ONCE)))
    return told


class Exported:
    """What the node's exporter says of our application."""

    def __init__(self) -> None:
        import ray

        self._url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
        self._samples: list[tuple[str, dict[str, str], float]] = []

    def scrape(self) -> None:
        text = httpx.get(self._url).text
        found = [(name, dict(LABEL.findall(labels)), float(value)) for name, labels, value in SAMPLE.findall(text)]
        self._samples = [sample for sample in found if sample[1].get("application") == APPLICATION]

    def sum(self, series: Series, **tags: str) -> float:
        name = series.exported + ("_count" if series.kind == "histogram" else "")
        return sum(value for own, labels, value in self._samples if own == name and tags.items() <= labels.items())

    def tags(self, series: Series, name: str) -> set[str]:
        return {labels[name] for own, labels, _ in self._samples if own == series.exported}


@pytest.fixture(scope="module")
def exported(told):
    """The same once Ray has got round to it, which is every second here."""
    exported, deadline = Exported(), time.monotonic() + 60
    finished = sum(told.finished.values())
    while time.monotonic() < deadline:
        exported.scrape()
        waiting = exported.sum(series.RUNNING) + exported.sum(series.DRAFTER_SESSIONS)
        tokens = exported.sum(series.GENERATION_TOKENS)
        ended = exported.sum(series.REQUEST_LATENCY)
        if (waiting, tokens, ended) == (0, told.usage["completion_tokens"], finished):
            break
        time.sleep(1)
    time.sleep(3)  # what was read may have been exported in the middle of being published
    exported.scrape()
    return exported


def test_tokens_are_those_of_the_bills(told, exported):
    assert exported.sum(series.GENERATION_TOKENS) == told.usage["completion_tokens"]
    assert exported.sum(series.PROMPT_TOKENS) == told.usage["prompt_tokens"]


def test_accepted_drafts_are_those_of_the_bills(told, exported):
    accepted = told.usage["accepted_prediction_tokens"]
    assert exported.sum(series.ACCEPTED_TOKENS) == exported.sum(series.ACCEPTED_AT) == accepted > 0
    assert exported.tags(series.ACCEPTED_AT, "position") == {"0", "1", "2"}
    assert exported.sum(series.DRAFT_TOKENS) >= accepted + told.usage["rejected_prediction_tokens"] > accepted


def test_tau_follows(told, exported):
    firsts = sum(told.finished.values())
    assert exported.sum(series.DECODE_TOKENS) == told.usage["completion_tokens"] - firsts
    assert 1 < exported.sum(series.DECODE_TOKENS) / exported.sum(series.DECODE_PASSES) <= 4


def test_endings_and_latencies_are_counted_by_sequence(told, exported):
    assert set(told.finished) == {"stop", "length"}
    for reason, count in told.finished.items():
        assert exported.sum(series.REQUESTS, finished_reason=reason) == count
    assert exported.sum(series.REQUESTS, finished_reason="refused") == told.statuses["429"]
    for latency in (series.TIME_TO_FIRST_TOKEN, series.REQUEST_LATENCY):
        assert exported.sum(latency) == sum(told.finished.values())
    assert exported.sum(series.INTER_TOKEN_LATENCY) > 0


def test_status_codes_are_counted_and_overload_is_429(told, exported):
    assert set(told.statuses) == {"200", "400", "404", "429"}
    for status, count in told.statuses.items():
        assert exported.sum(series.ANSWERS, status=status, path="/v1/completions") == count


def test_both_sides_of_the_channel_agree(exported):
    assert exported.tags(series.CHANNEL_CYCLES, "drafter") == {"same", "other"}
    assert exported.sum(series.CHANNEL_CYCLES) == exported.sum(series.DRAFTER_REQUESTS)
    assert exported.sum(series.DRAFTER_BATCH) == exported.sum(series.DRAFTER_REQUESTS)
    assert exported.sum(series.DRAFTER_DRAFTS) >= exported.sum(series.NUM_DRAFTS) > 0
    assert exported.sum(series.CHANNEL_BYTES, way="sent") > exported.sum(series.CHANNEL_BYTES, way="received") > 0


def test_the_engine_s_phases_are_there(exported):
    assert {"verify", "propose", "accept", "prefill", "channel"} <= exported.tags(series.PHASE_SECONDS, "phase")
    assert exported.sum(series.PHASE_SECONDS) > 0


def test_the_gateway_gathers_the_same(url, exported):
    text = httpx.get(f"{url}/metrics").text
    found = {(name, labels) for name, labels, _ in SAMPLE.findall(text)}
    names = {name.removesuffix("_total") for name, _ in found}
    assert names >= {f"ray_{each.name}" for each in (series.RUNNING, series.GENERATION_TOKENS, series.ANSWERS)}
    assert all(dict(LABEL.findall(labels))["application"] == APPLICATION for _, labels in found)
    assert exported.sum(series.GENERATION_TOKENS) == sum(
        float(value) for name, _, value in SAMPLE.findall(text) if name == series.GENERATION_TOKENS.exported
    )
