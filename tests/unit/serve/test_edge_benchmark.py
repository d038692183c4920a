"""The edge benchmark's ways, comparisons and page, from figures."""

import math
from typing import Any

import pytest

from moray.config import validate
from moray.edge.device.private import Redactor
from serve.bench.configs import EdgeBenchmarkConfig
from serve.bench.edge import compare, ways_of
from serve.bench.edge_offline import CutAnswer, row_of
from serve.bench.edge_page import render_edge
from serve.bench.edge_private import count_leaks
from serve.bench.edge_private import row_of as row_of_private

APPLICATION = {"target": {"model": "t"}, "drafters": {"m": "a", "e": "b"}, "edge": {"drafters": ["m", "e"]}}


def config_of(**more: Any) -> EdgeBenchmarkConfig:
    return validate(EdgeBenchmarkConfig, {"application": APPLICATION, "questions": "q.jsonl"} | more)


def row(way: str, speed: float, tau: float | None) -> dict[str, Any]:
    numbers = dict.fromkeys(
        ("speedup", "p95_seconds", "ttft_ms", "calls", "bytes_up", "bytes_down", "server_cpu_ms", "device_cpu_ms"), 1.0
    )
    counts = {"wake_ups": 1.0, "equal_texts": 4, "num_answers": 4, "energy_mj": None, "depth": tau, "layers": tau}
    return {"way": way, "drafter": None, "tokens_per_second": speed, "tau": tau, **numbers, **counts}


def test_every_drafter_is_measured_in_every_way():
    names = [way["name"] for way in ways_of(config_of(in_flight=[1, 2], depths=[2, 4]))]
    assert names == [
        *("API, plain", "API, m", "API, e"),
        *("edge, m", "edge, e", "edge, m, run ahead", "edge, e, run ahead"),
        *("edge, m, depth 2", "edge, e, depth 2", "edge, m, depth 4", "edge, e, depth 4"),
    ]
    last = ways_of(config_of(depths=[4]))[-1]["edge"]
    assert last is not None
    assert last["tree"] == {"type": "chain", "depth": 4}


def test_drafters_are_compared_beside_what_was_published():
    rows: Any = [
        row("API, plain", 10, None),
        row("edge, m", 24, 2.4),
        row("edge, e", 20, 2.0),
        row("edge, m, depth 2", 25, 2.2),
        row("edge, m, depth 4", 20, 2.5),
    ]
    found = compare(rows, {"m": "dynamic-moa", "e": "eagle"})
    assert [pair["what"] for pair in found] == ["edge, m over edge, e", "edge, m over edge, m, depth 2"]
    assert (found[0]["speed"], found[0]["tau"]) == pytest.approx((1.2, 1.2))
    assert (found[0]["published_speed"], found[0]["published_tau"]) == (1.84, 1.53)
    assert found[1]["speed"] == pytest.approx(0.96)
    assert found[1]["published_speed"] is None
    network = {"name": "wan", "delay_ms": 4.5, "jitter_ms": 0, "applies": "each_way", "rate_mbit": 50, "loss": 0.0}
    table = {"network": network, "rows": rows, "comparisons": found, "num_questions": 1}
    page = render_edge({"networks": [table], "energy_missing": "no counter"})
    assert "edge, m over edge, e: 1.20 in tokens/s, 1.20 in tau (published: 1.84 and 1.53)" in page
    assert page.count("<svg") == 5


def test_what_was_written_alone_is_counted():
    answers = [
        CutAnswer([1, 2, 3, 4], [1, 2, 9, 9, 9], 0, [1.0, 1.0, 2.0, 2.0], [0.5] * 4),
        CutAnswer([5], [7, 8], 1, [4.0], [0.5]),
        CutAnswer([], [7], 0, [], []),
    ]
    row = row_of("m", 0.5, answers)
    assert (row["num_cuts"], row["num_written"], row["first_mismatch"]) == (3, pytest.approx(5 / 3), 0)
    assert row["agreement"] == {"32": 2 / 8, "64": 2 / 8}
    assert row["perplexity"] == pytest.approx(math.exp(2.0))
    assert row["own_perplexity"] == pytest.approx(math.exp(0.5))
    assert row["num_changed"] == 1
    assert row_of("m", 0.5, answers[2:])["perplexity"] is None


def test_private_answers_are_compared_and_leaks_are_found():
    redactor = Redactor()
    redactor.redact([{"role": "user", "content": "Greet <private>Ada Byron</private>."}])
    row = row_of_private("q", "Dear [P1], hello [P2]", "Dear Ada Byron, good day", redactor, ["Ada Byron"], 0)
    assert row == {"question_id": "q", "agreement": 3 / 5, "num_placeholders": 1, "num_expected": 1, "num_leaks": 0}
    messages = ["Greet [P1]", "Greet Ada Byron", '{"tokens":[7,1,2,3]}', '{"tokens":[1,2]}', '{"tokens":[9,1,2,3]}']
    codes = {"Ada Byron": [7, 1, 2, 3], " Ada Byron": [9, 1, 2, 3]}
    assert count_leaks(messages, ["Ada Byron"], codes.__getitem__) == 3
    digits = {"417": [4, 1, 7], " 417": [5, 1, 7]}
    assert count_leaks(['{"tokens":[4170,14,1,7]}', '{"tokens":[3,4,1,7]}'], ["417"], digits.__getitem__) == 1
