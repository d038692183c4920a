"""Moray beside other engines: real processes, the same text, and rows that cannot be measured say why."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_targets import save_chat_target, save_target

from moray.bench.peers.benchmark import benchmark_peers
from moray.bench.peers.config import PeersBenchmarkConfig
from moray.bench.peers.console import print_peers
from moray.bench.peers.gguf_file import write_gguf
from moray.bench.peers.page import render_peers
from moray.config import validate
from moray.errors import ConfigError, DataError
from moray.gguf.convert import _halves
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
        {"engine": "moray", "drafter": "no/such/folder", "dtype": "bfloat16"},
        {"engine": "transformers"},
        {"engine": "transformers", "drafter": settings["target"]["model"], "depth": 3},
        {"engine": "llama-cpp"},
    )


def test_every_engine_gives_the_text_of_transformers_and_its_speed_is_of_what_it_did(result):
    measured = [row for row in result["rows"] if row["failure"] is None]
    assert [(row["engine"], row["drafting"]) for row in measured] == [
        ("moray", "plain"), ("moray", "prompt-lookup"), ("transformers", "plain"), ("transformers", "target"),
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
    assert failures["llama-cpp"].startswith("not installed: there is no '")
    assert failures["llama-cpp"].endswith("; run: make peers")
    print_peers(result, Console(width=160))
    printed = capsys.readouterr().out
    assert "4 of 4" in printed
    assert "note: llama-cpp float32, plain: not measured: not installed" in printed
    page = render_peers(result)
    assert page.count("<tr>") == 1 + 4
    assert "<svg" in page


def test_nothing_measured_is_an_error_and_rows_are_named_once(settings):
    with pytest.raises(DataError, match="no row could be measured; the first: vllm float32, plain: not installed"):
        measure(settings, {"engine": "vllm"})
    with pytest.raises(ConfigError, match="peers holds 'moray float32, plain' twice"):
        measure(settings, {"engine": "moray"}, {"engine": "moray", "depth": 3})
    with pytest.raises(ConfigError, match="llama-cpp-python drafts by prompt-lookup alone"):
        measure(settings, {"engine": "llama-cpp", "drafter": "some/folder"})


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
