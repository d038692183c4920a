"""The decoding benchmark on a tiny target: what it claims follows from what it measured, and it can be read back."""

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_drafters import build
from tiny_targets import TinyTarget, save_chat_target

from moray.bench.configs import DecodeBenchmarkConfig
from moray.bench.recording import check_writable
from moray.config import validate
from moray.decoding.engine.stats import CYCLE_PHASES
from moray.drafters.checkpoint import save_drafter
from moray.drafters.config_base import BlockConfig
from moray.drafters.configs import EagleConfig, MedusaConfig
from moray.errors import ConfigError, DataError
from moray.provenance import write_json_atomically
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from pipelines.benchmarks.decode import benchmark_decoding, print_benchmark

CHAIN, DEEP = {"type": "chain", "depth": 3}, {"type": "adaptive", "depth": 4, "breadth": 2, "nodes": 6}
EAGLE = EagleConfig(type="eagle", layer=BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=96))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, two random drafters and two questions, in which prompt lookup finds something."""
    folder = tmp_path_factory.mktemp("benchmark")
    save_chat_target(folder / "target")
    target = Target.load(TargetConfig(model=str(folder / "target"), device="cpu"))
    tiny, text = TinyTarget("chat", folder / "target", target), ChatTokenizer.load(str(folder / "target")).fingerprint
    save_drafter(folder / "eagle", build(tiny, EAGLE), text)
    save_drafter(folder / "medusa", build(tiny, MedusaConfig(type="medusa", num_heads=3)), text)
    rows = [{"question_id": number, "category": "echo", "turns": ["one two one two one two"]} for number in range(2)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def configure(folder: Path, **settings) -> DecodeBenchmarkConfig:
    values = {
        "target": {"model": str(folder / "target"), "device": "cpu"},
        "drafters": [{"type": "ngram"}, str(folder / "eagle"), str(folder / "medusa")],
        "trees": [CHAIN, DEEP],
        "questions": str(folder / "questions.jsonl"),
        "max_new_tokens": 12,
    }
    return validate(DecodeBenchmarkConfig, values | settings)


@pytest.fixture(scope="module")
def result(folder) -> dict:
    return benchmark_decoding(configure(folder), Console(quiet=True))


def test_every_drafter_is_measured_with_every_tree_it_can_grow(result):
    names = [(row["drafter"], row["tree"]) for row in result["rows"]]
    chain, deep = "chain-3", "adaptive-4x2-6"
    assert names == [(name, tree) for name in ("ngram", "eagle", "medusa") for tree in (chain, deep)]
    depth = "drafter 'medusa' drafts at most 3 levels, so tree 'adaptive-4x2-6' grows no deeper with it"
    assert result["notes"] == [depth, "torch.compile is off"]
    assert all((row["num_prompts"], row["num_tokens"], row["lossless"]) == (2, 24, True) for row in result["rows"])
    assert result["plain_ms"] > 0
    assert result["settings"]["max_new_tokens"] == 12
    assert {"machine", "versions"} <= set(result)


def test_efficiency_follows_from_the_row_s_own_figures(result):
    for row in result["rows"]:
        assert set(row["phases_ms"]) == {*CYCLE_PHASES, "other"} == {
            "propose", "verify", "accept", "commit", "observe", "other"
        }  # fmt: skip
        assert row["tau"] >= 1
        cycle, step = sum(row["phases_ms"].values()), result["plain_ms"]
        assert row["speedup_vs_plain"] == pytest.approx(row["tau"] * step / cycle)
        assert row["verify_cost"] == pytest.approx(row["phases_ms"]["verify"] / step)
        if row["draft_steps"] == 0:
            assert row["draft_cost"] is row["efficiency"] is None
            continue
        drafting = row["draft_steps"] * row["draft_cost"]
        assert drafting == pytest.approx(row["phases_ms"]["propose"] / step)
        assert row["efficiency"] == pytest.approx(row["speedup_vs_plain"] / (row["tau"] / (1 + drafting)))
    assert all(
        row["draft_steps"] == 3 for row in result["rows"] if row["tree"] == "chain-3" and row["drafter"] != "ngram"
    )


def test_a_benchmark_is_written_as_json_without_nan_and_printed(result, tmp_path):
    path = tmp_path / "new" / "benchmark.json"
    write_json_atomically(path, result)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(path.read_text(), parse_constant=refuse) == json.loads(json.dumps(result))
    console = Console(record=True, width=200, quiet=False, file=(tmp_path / "out.txt").open("w"))
    print_benchmark(result, console)
    text = console.export_text()
    assert all(word in text for word in ("eagle", "adaptive-4x2-6", "observe", "note: torch.compile is off"))


def test_answers_without_a_cycle_are_written_and_printed_too(folder, tmp_path):
    result = benchmark_decoding(configure(folder, max_new_tokens=1, drafters=[{"type": "ngram"}]), Console(quiet=True))
    assert [(row["tau"], row["efficiency"], row["speedup_vs_plain"]) for row in result["rows"]] == [(None,) * 3] * 2
    write_json_atomically(tmp_path / "benchmark.json", result)
    print_benchmark(result, Console(quiet=True))
    assert not math.isnan(result["plain_ms"])


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"report is '.*file/benchmark.json', which cannot be written"):
        check_writable(tmp_path / "file" / "benchmark.json")


def test_the_check_leaves_no_file_behind_and_keeps_one_that_was_there(tmp_path):
    new, old, link = tmp_path / "new" / "tree.yaml", tmp_path / "old.yaml", tmp_path / "link.yaml"
    old.write_text("trees: []\n")
    link.symlink_to(tmp_path / "nowhere.yaml")
    for path in (new, old, link):
        check_writable(path)
    assert not new.exists()
    assert old.read_text() == "trees: []\n"
    assert link.is_symlink()
    assert not link.exists()


def test_questions_that_do_not_fit_are_refused(folder, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 600}))
    threads = torch.get_num_threads()
    with pytest.raises(DataError, match=r"no prompt of questions '.*long.jsonl' fits into .* 512 tokens; give shorter"):
        benchmark_decoding(configure(folder, questions=str(path)), Console(quiet=True))
    torch.set_num_threads(threads)
