"""Moray beside other engines: real processes, the same text, and rows that cannot be measured say why."""

import json
import sys
import time
from dataclasses import asdict

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_targets import save_chat_target, save_target

from moray.bench.peers.answering import PeerRow, Settings
from moray.bench.peers.benchmark import benchmark_peers
from moray.bench.peers.config import PeersBenchmarkConfig
from moray.bench.peers.console import print_peers
from moray.bench.peers.figures import Answers
from moray.bench.peers.gguf_file import write_gguf
from moray.bench.peers.page import render_peers
from moray.bench.peers.process import MODULES, EngineProcess
from moray.config import validate
from moray.errors import ConfigError, DataError
from moray.models.gguf_file import _halves
from moray.targets.spec import read_spec


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    target = save_chat_target(folder / "target")
    questions = folder / "questions.jsonl"
    rows = [{"question_id": n, "category": "demo", "turns": [f"number {n} " * (1 + n)]} for n in range(4)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": {"model": str(target)},
        "questions": str(questions),
        "max_new_tokens": 12,
        "threads": 1,
        "environments": str(folder / "environments"),
    }


def measure(settings, *peers, **more):
    config = validate(PeersBenchmarkConfig, settings | {"peers": list(peers)} | more)
    return benchmark_peers(config, Console(quiet=True))


@pytest.fixture(scope="module")
def result(settings):
    return measure(
        settings,
        {"engine": "moray"},
        {"engine": "moray", "drafter": "prompt-lookup"},
        {"engine": "moray", "drafter": "no/such/folder"},
        {"engine": "transformers"},
        {"engine": "transformers", "drafter": settings["target"]["model"], "depth": 3},
        {"engine": "llama-cpp"},
    )


def test_every_engine_gives_the_text_of_transformers_and_its_speed_is_of_what_it_did(result):
    measured = [row for row in result["rows"] if row["failure"] is None]
    assert [(row["engine"], row["drafting"]) for row in measured] == [
        ("moray", "plain"), ("moray", "prompt-lookup-8"), ("transformers", "plain"), ("transformers", "target-3"),
    ]  # fmt: skip
    for row in measured:
        assert row["equal_texts"] == 4
        assert row["mean_equal_tokens"] == row["tokens"] / 4 > 6
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        low, high = row["interval"]
        assert 0 < low <= row["tokens_per_second"] <= high
        limit = result["plain_limit_tokens_per_second"]["float32"]
        assert row["of_plain_limit"] == pytest.approx(row["tokens_per_second"] / limit)
    plain = measured[2]
    assert plain["ratio_to_transformers"] == 1.0
    assert measured[0]["ratio_to_transformers"] == measured[0]["tokens_per_second"] / plain["tokens_per_second"]


def test_what_cannot_be_measured_says_why(result, capsys):
    failures = {row["engine"]: row["failure"] for row in result["rows"] if row["failure"] is not None}
    assert failures.keys() == {"moray", "llama-cpp"}
    assert "no/such/folder" in failures["moray"]
    assert failures["llama-cpp"].startswith("not installed in '")
    assert failures["llama-cpp"].endswith("environments/llama-cpp'; run: make peers")
    print_peers(result, Console(width=160))
    printed = capsys.readouterr().out
    assert "4 of 4" in printed
    assert "note: llama-cpp float32, plain: not measured: not installed" in printed
    page = render_peers(result)
    assert page.count("<tr>") == 1 + 4
    assert "<svg" in page


def test_tau_is_of_the_passes_that_verified_a_draft(settings):
    fixed = {"engine": "moray", "drafter": "prompt-lookup", "depth": 2, "adaptive": False}
    (row,) = measure(settings, fixed)["rows"]
    assert 1 <= row["tau"] <= 1 + 2
    counted = Answers(PeersBenchmarkConfig.model_validate(settings | {"peers": (fixed,)}).peers[0])
    counted.drafted = [(3, 4), None, (1, 0)]
    assert counted.tau == 1 + 4 / 4
    counted.drafted = [None, (0, 0)]
    assert counted.tau is None
    with pytest.raises(ConfigError, match="adaptive is false, which only moray reads"):
        measure(settings, {"engine": "transformers", "adaptive": False})


def test_nothing_measured_is_an_error_and_rows_are_named_once(settings):
    with pytest.raises(DataError, match="no row could be measured; the first: vllm float32, plain: not installed"):
        measure(settings, {"engine": "vllm"})
    with pytest.raises(
        ConfigError, match="peers holds 'moray float32, plain' twice; leave one out, or give them a `name`"
    ):
        measure(settings, {"engine": "moray"}, {"engine": "moray", "depth": 3})
    with pytest.raises(ConfigError, match="llama-cpp-python drafts by prompt-lookup alone"):
        measure(settings, {"engine": "llama-cpp", "drafter": "some/folder"})


FAKE_ENGINE = """
import os, time
from moray.bench.peers.answering import answer_from

def load(settings):
    def answer(prompt, most):
        print("libraries print as they like", flush=True)
        if prompt == [1]:
            time.sleep(60)
        if prompt == [2]:
            os._exit(7)
        return prompt[:most]
    return "1", lambda row: answer

answer_from(load)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(source): a process of an engine of one row."""
    started = []

    def make(source=FAKE_ENGINE):
        (tmp_path / "fake_engine.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setitem(MODULES, "vllm", "fake_engine")
        settings = Settings("", "", "float32", 1, 9, [0], [PeerRow(None, 1)])
        started.append(EngineProcess("vllm", sys.executable, asdict(settings), tmp_path / "log"))
        return started[-1]

    yield make
    for process in started:
        process.close()


def is_halted(process):
    """Signals take a moment."""
    end = time.monotonic() + 10
    while psutil.Process(process._process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < end:
        time.sleep(0.01)
    return psutil.Process(process._process.pid).status() == psutil.STATUS_STOPPED


def test_an_engine_is_halted_but_while_it_answers(start):
    process = start()
    process.wait_until_loaded(60)
    assert (process.version, process.failures, is_halted(process)) == ("1", {}, True)
    tokens, seconds = process.answer(0, [5, 6, 7], 2, 60)
    assert process.drafted is None, "this engine counts no drafts"
    assert tokens == [5, 6]
    assert seconds < 60
    assert is_halted(process)


@pytest.mark.parametrize(
    ("prompt", "seconds", "message"), [([1], 0.5, "no reply within 0 s"), ([2], 60, "ended with exit code 7")]
)
def test_an_engine_that_hangs_or_dies_is_ended_and_says_so_every_time(start, prompt, seconds, message):
    process = start()
    process.wait_until_loaded(60)
    for _ in range(3):
        with pytest.raises(DataError, match=f"{message}; its output is in"):
            process.answer(0, prompt, 5, seconds)
    assert process._process.poll() is not None, "it would disturb the others"


def test_an_engine_that_cannot_be_loaded_says_why(start):
    with pytest.raises(DataError, match=r"ValueError: no such dtype; its output is in"):
        start(
            "from moray.bench.peers.answering import answer_from\n"
            "def load(settings):\n    raise ValueError('no such dtype')\n"
            "answer_from(load)\n"
        ).wait_until_loaded(60)
    with pytest.raises(DataError, match=r"hello; its output is in"):
        start("print('hello', flush=True)\n").wait_until_loaded(60)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen2", "float32")])
def test_a_gguf_file_holds_the_target_s_own_weights(tmp_path, family, dtype):
    from gguf import GGUFReader, dequantize

    folder = save_target(tmp_path / "target", family)
    spec = read_spec(str(folder))
    write_gguf(folder, spec, dtype, tmp_path / "made.gguf")
    reader = GGUFReader(tmp_path / "made.gguf")
    assert reader.fields["general.architecture"].contents() == family
    assert reader.fields[f"{family}.attention.head_count_kv"].contents() == spec.num_kv_heads
    found = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    weights = load_file(folder / "model.safetensors")
    assert len(found) == len(weights)
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if family == "llama" else {}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}
    for part, theirs in names.items():
        got = found[f"blk.1.{part}.weight"]
        got = _halves(got, heads[part]) if part in heads else got
        wanted = weights[f"model.layers.1.{theirs}.weight"]
        wanted = wanted.bfloat16().float() if dtype == "bfloat16" else wanted
        assert np.array_equal(got, wanted.numpy())
    norm = torch.from_numpy(found["output_norm.weight"].copy())
    assert torch.equal(norm, weights["model.norm.weight"]), "vectors stay in float32"


def test_a_gguf_file_of_a_target_with_windows_is_refused(tmp_path):
    folder = save_target(tmp_path / "target", "mistral", sliding_window=32)
    with pytest.raises(ConfigError, match="has sliding windows; GGUF files are written for targets without"):
        write_gguf(folder, read_spec(str(folder)), "float32", tmp_path / "made.gguf")
