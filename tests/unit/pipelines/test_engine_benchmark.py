"""The engine's benchmark: both ways give the same texts, and its figures are those of what happened."""

import json

import pytest
from rich.console import Console
from tiny_targets import save_chat_target

from moray.bench.configs import EngineBenchmarkConfig
from moray.config import validate
from moray.errors import DataError
from pipelines.benchmarks.engine import benchmark_engine, print_engine_benchmark


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine-benchmark")
    target = save_chat_target(folder / "target")
    questions = folder / "questions.jsonl"
    rows = [{"question_id": n, "category": "demo", "turns": [f"number {n} " * (1 + n)]} for n in range(5)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": {"model": str(target), "device": "cpu"},
        "drafters": [{"type": "pretrained", "model": str(target)}, {"type": "ngram"}],
        "questions": str(questions),
        "batches": [1, 3],
        "max_new_tokens": 12,
        "rounds": 2,
    }


@pytest.mark.parametrize(
    "tree", [{"type": "adaptive", "depth": 3}, {"type": "chain", "depth": 2}], ids=lambda t: t["type"]
)
def test_both_ways_answer_alike_at_every_size(settings, tree, capsys):
    result = benchmark_engine(validate(EngineBenchmarkConfig, settings | {"tree": tree}), Console(quiet=True))
    assert [(row["drafter"], row["batch"]) for row in result["rows"]] == [
        (name, size) for name in ("pretrained", "ngram") for size in (1, 3)
    ]
    for row in result["rows"]:
        assert row["equal_share"] == 1.0
        assert row["num_answers"] == 5
        low, high = row["speedup_quartiles"]
        assert 0 < low <= row["speedup"] <= high
        assert row["plain_tokens_per_second"] > 0
    if tree["type"] == "chain":
        assert all(row["tau"] > 2 for row in result["rows"][:2]), "the target drafts for itself"
    print_engine_benchmark(result, Console(width=120))
    assert "pretrained" in capsys.readouterr().out


def test_prompts_that_do_not_fit_are_left_out(settings):
    config = validate(EngineBenchmarkConfig, settings | {"max_new_tokens": 100_000})
    with pytest.raises(DataError, match="no prompt"):
        benchmark_engine(config, Console(quiet=True))
