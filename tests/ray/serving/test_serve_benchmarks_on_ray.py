"""The benchmarks that deploy the application, on the tiny target: every figure is there, and tokens do not change."""

import io
import json

import pytest
from rich.console import Console

from moray.config import validate
from serve.bench.configs import ScalingBenchmarkConfig, SideBySideConfig
from serve.bench.scaling import benchmark_scaling, print_scaling
from serve.bench.side_by_side import benchmark_side_by_side, print_side_by_side

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def load(tiny_target, tmp_path_factory):
    questions = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    texts = ("one two three", "four five", "six seven eight nine")
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return {
        "application": {
            "target": {"model": str(tiny_target), "device": "cpu"},
            "drafters": {"same": {"type": "pretrained", "model": str(tiny_target)}},
            "engine": {
                "max_num_seqs": 8,
                "kv_cache_tokens": 4096,
                "tree": {"type": "chain", "depth": 3},
                "num_micro_batches": 2,
            },
            "draft_timeout_ms": 5000,
            "threads": 1,
        },
        "questions": str(questions),
        "max_tokens": 24,
        "num_requests": 8,
        "rounds": 1,
    }


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_pools_are_scaled_and_set_beside_the_model(ray_session, load):
    one, more = {"targets": 1, "drafters": 1}, {"targets": 1, "drafters": 2}
    slow = {"verify": {"ms": 20}, "draft": {"ms_per_sequence": 40}}  # a busy machine's own work is little beside it
    config = validate(
        ScalingBenchmarkConfig, load | {"pools": [one, more], "regimes": {"slow": slow}, "num_streams": 4}
    )
    result = json.loads(json.dumps(benchmark_scaling(config, Console(quiet=True))))
    first, second = result["regimes"]["slow"]["rows"]
    assert (first["ratio"], first["predicted_ratio"], second["predicted_ratio"]) == (1.0, 1.0, 2.0)
    assert first["tau"] > 2, "the drafter is the target itself"
    assert [row["bound"] for row in (first, second)] == ["drafters", "drafters"]
    # How near speeds come to that is for the benchmark to say: other tests share these cores.
    assert second["ratio"] == pytest.approx(second["tokens_per_second"] / first["tokens_per_second"], rel=0.01)
    out = io.StringIO()
    print_scaling(result, Console(file=out, width=100))
    assert "SYNTHETIC PER-STEP COST" in out.getvalue()


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_applications_are_asked_in_turn(ray_session, load):
    config = validate(
        SideBySideConfig,
        load
        | {
            "applications": {"pool": {}, "inside": {"placement": "in_process", "engine": {"num_micro_batches": 1}}},
            "ways": {
                "pool": {"application": "pool", "cores": {"Drafter": [0]}},
                "inside": {"application": "inside"},
            },
            "pairs": [["pool", "inside"]],
            "levels": [{"max_concurrency": 2}],
        },
    )
    result = json.loads(json.dumps(benchmark_side_by_side(config, Console(quiet=True))))
    (level,) = result["levels"]
    assert (level["equal_texts"]["compared"], level["equal_texts"]["share"]) == (8, 1.0)
    assert all(figures["tau"] > 2 for figures in level["variants"].values())
    assert level["ratios"]["pool/inside"]["mean_tpot"]["ratio"] > 0
    out = io.StringIO()
    print_side_by_side(result, Console(file=out, width=100))
    assert "pool/inside: speed" in out.getvalue()
