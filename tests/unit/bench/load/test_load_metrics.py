"""The arithmetic of a serving benchmark on requests that are made up, its arrivals and its configuration."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from moray.bench.load.arrivals import arrival_times
from moray.bench.load.config import GoodputConfig, LevelConfig, ServeBenchmarkConfig
from moray.bench.load.console import block
from moray.bench.load.events import EventReader
from moray.bench.load.metrics import acceptance, is_good, measure, peak_concurrency, spread
from moray.bench.load.request import RequestRecord
from moray.bench.load.rounds import Round, order_of
from moray.bench.load.variants import equal_texts, ratios
from moray.commands import load_command
from moray.config import validate
from moray.errors import ConfigError
from pipelines import benchmark


def answered(start=1.0, times=(1.2, 1.3, 1.7), sizes=(1, 1, 4), end=1.7, text="abc", **given):
    fields = {"num_input": 10, "num_output": 6, "num_accepted": 3, "num_rejected": 1, "has_usage": True} | given
    return RequestRecord(
        0, "q", 0.5, start, end, "ok", None, list(times), list(sizes), sizes_are_tokens=True, text=text, **fields
    )


def test_the_times_of_a_request():
    record = answered()
    assert record.ttft == pytest.approx(0.2)
    assert record.e2e == pytest.approx(0.7)
    assert record.tpot == pytest.approx(0.1)
    assert record.gaps == pytest.approx([0.1, 0.4])
    assert [count for _, count in record.token_gaps] == [1, 4]
    assert [seconds for seconds, _ in record.token_gaps] == pytest.approx([0.1, 0.1])
    assert answered(num_output=1).tpot is None


def test_tokens_are_shared_out_by_characters_where_nobody_tells():
    record = answered(sizes=(2, 2, 8))
    record.sizes_are_tokens = False
    assert [count for _, count in record.token_gaps] == [1, 4]


def test_every_figure_of_a_block():
    refused = RequestRecord(1, "r", 0.5, 0.5, 0.6, "rejected", "429: full")
    broken = RequestRecord(2, "s", 0.5, 1.1, 1.3, "failed", "500: oh")
    rounds = [Round((answered(), refused, broken), 2.0), Round((answered(),), 2.0)]
    found = measure(rounds, GoodputConfig(ttft_ms=300))
    assert (found["completed"], found["failed"], found["rejected"]) == (2, 1, 1)
    assert found["errors"] == {"429: full": 1, "500: oh": 1}
    assert (found["duration"], found["total_input_tokens"], found["total_output_tokens"]) == (4.0, 20, 12)
    assert (found["request_throughput"], found["request_goodput"]) == (0.5, 0.5)
    assert (found["output_throughput"], found["total_token_throughput"]) == (3.0, 8.0)
    assert found["max_concurrent_requests"] == 2
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["itl_ms"]["median"] == pytest.approx(250)
    assert found["itl_per_token_ms"]["p99"] == pytest.approx(100)
    assert found["tokens_per_second_per_user"] == pytest.approx(10)
    assert found["tokens_per_second_per_user_with_ttft"] == pytest.approx(6 / 0.7)
    assert (found["tau"], found["acceptance_rate"]) == (2.0, 0.75)
    lines = block(LevelConfig(request_rate=2.0), found)
    for line in (
        "Successful requests:                    2",
        "Rejected (429):                         1",
        "1 x 500: oh",
    ):
        assert line in lines
    assert "Mean TTFT (ms):                         200.00" in lines


def test_nothing_answered_gives_no_figures():
    found = measure([Round((RequestRecord(0, "q", 0.0, error="500: oh"),), 1.0)], GoodputConfig())
    assert (found["tau"], found["ttft_ms"]["mean"], found["itl_per_token_ms"]["p99"]) == (None, None, None)
    assert block(LevelConfig(), found)


def test_what_a_server_does_not_tell_is_not_made_up():
    assert acceptance([answered(num_accepted=None)])["tau"] is None
    assert acceptance([answered(num_accepted=0, num_rejected=0)]) == {
        "accepted_tokens": 0, "rejected_tokens": 0, "tau": 1.0, "acceptance_rate": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"ttft_ms": 199}, False),
        ({"tpot_ms": 101}, True),
        ({"tpot_ms": 99}, False),
        ({"e2e_ms": 701}, True),
        ({}, True),
    ],
)
def test_a_good_request_keeps_every_limit(limits, kept):
    assert is_good(answered(), GoodputConfig(**limits)) == kept


def test_percentiles_and_peaks():
    assert spread([1.0, 2.0, 3.0, 4.0])["median"] == 2.5
    assert spread(list(range(101)))["p99"] == 99
    ends_as_the_next_begins = [answered(start=0.0, end=1.0), answered(start=1.0, end=2.0)]
    assert peak_concurrency(ends_as_the_next_begins) == 1


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_arrivals_have_their_rate_and_their_burstiness(burstiness, variation):
    level = LevelConfig(request_rate=5.0, burstiness=burstiness)
    times = arrival_times(level, 20_000, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)
    assert times == arrival_times(level, 20_000, seed=3)
    assert times != arrival_times(level, 20_000, seed=4)
    assert arrival_times(LevelConfig(), 3, 0) == [0, 0, 0]


def test_events_are_put_together_wherever_they_are_cut():
    stream = b': hello\r\n\r\ndata: {"a":1}\n\nevent: x\r\ndata: b\r\ndata:c\r\n\r\ndata: [DONE]\n\n'
    for size in (1, 2, 7, 1000):
        reader = EventReader()
        found = [data for at in range(0, len(stream), size) for data in reader.feed(stream[at : at + size])]
        assert found == [b'{"a":1}', b"b\nc", b"[DONE]"]


def test_variants_are_compared_round_by_round():
    fast, slow = Round((answered(),), 1.0), Round((answered(text="abd"),), 2.0)
    figures = [measure([each], GoodputConfig()) for each in (fast, slow)]
    found = ratios(figures[0], figures[1], [(figures[0], figures[1]), (figures[0], figures[0])])
    assert found["output_throughput"] == {
        "ratio": 2.0,
        "low": 1.0,
        "high": 2.0,
        "quartiles": (1.25, 1.5, 1.75),
        "rounds": [2.0, 1.0],
    }
    same = equal_texts({"on": [fast, fast], "off": [fast, slow]})
    assert (same["compared"], same["equal"], same["share"]) == (2, 1, 0.5)
    assert same["different"][0]["texts"] == {"on": "abc", "off": "abd"}
    assert [order_of(["on", "off"], number) for number in range(2)] == [["on", "off"], ["off", "on"]]


def test_an_address_is_taken_with_and_without_its_version():
    for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert validate(ServeBenchmarkConfig, {"url": url, "questions": "q"}).url == "http://a:1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "an address such as"),
        ({"url": "http://me:secret@a"}, "api_key_env"),
        ({"variants": {"on": {"stream": False}}}, "variants.on sets stream"),
        ({"variants": {}}, "variants"),
        ({"baseline": "of"}, "baseline is 'of'; the variants are default"),
        ({"urls": {"of": "http://b"}}, "urls names 'of'; the variants are default"),
        ({"urls": {"default": "b:1"}}, "an address such as"),
        ({"levels": []}, "levels"),
        ({"levels": [{"request_rate": 0}]}, "request_rate"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        validate(ServeBenchmarkConfig, {"url": "http://a", "questions": "q"} | given)


def test_the_command_takes_an_address_beside_a_file(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[4])
    words = ["serve", "--url", "http://b:2/v1", "--json", "a.json", "--html", "a.html", "num_requests=3"]
    command, config = load_command(benchmark.COMMANDS, words)
    assert command.config_class is ServeBenchmarkConfig
    assert (config.url, config.report, config.html, config.num_requests) == ("http://b:2", "a.json", "a.html", 3)
    assert list(config.variants) == ["on", "off"]
    assert config.baseline_name == "off"
