"""Drafters for SmolLM2, trained for a moment and exported, run in other engines as they do in Moray: same text, same
acceptance.

It needs `make peers`, and the package registry for the target.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIGS = REPOSITORY / "configs"
DRAFTERS = {
    "eagle3": [],
    "eagle": ["drafter.bias=false", "drafter.reads_first_token=false", "drafter.draft_vocab_size=null"],
    "medusa": ["drafter.projections=frozen"],  # vLLM 0.32 cannot load heads over a reduced vocabulary
    "independent": [],
}
DEPTH = 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_other_engines_give_the_same_text_and_accept_as_many_tokens(
    tmp_path: Path, start_pipeline: Callable[..., Any]
) -> None:
    environments = REPOSITORY / "runs" / "peers"
    if not all((environments / engine / ".installed").is_file() for engine in ("vllm", "openvino")):
        pytest.skip("vLLM and OpenVINO GenAI are not installed: make peers")

    def run(name: str, *arguments: str) -> None:
        pipeline = start_pipeline(name, *arguments)
        assert pipeline.finish(1800) == 0, pipeline.output

    target, states = str(CONFIGS / "targets" / "smollm2.yaml"), tmp_path / "states"
    run("fetch_target")
    taps = ["cache.kv_layers=[]", "cache.hidden_depths=[-1,-4,-16,-29]", "chats.max_chats=80", f"output={states}"]
    run("cache_activations", target, str(CONFIGS / "activations" / "smollm2.yaml"), *taps)
    peers: list[dict[str, Any]] = [{"engine": "transformers"}, {"engine": "vllm"}]
    for name, settings in DRAFTERS.items():
        drafter, export, back = (str(tmp_path / f"{name}-{kind}") for kind in ("trained", "export", "imported"))
        preset = str(CONFIGS / "drafters" / f"{name}-smollm2.yaml")
        run("distill", target, preset, f"activations={states}", f"output={drafter}", "train.max_steps=12", *settings)
        run("export", target, f"drafter={drafter}", "format=hf", f"output={export}")
        run("import_drafter", target, f"source={export}", f"output={back}")
        peers.append({"engine": "moray", "drafter": back, "depth": DEPTH, "adaptive": False})
        engines = ["vllm", "openvino"] if name == "eagle3" else ["vllm"]
        peers += [{"engine": engine, "drafter": export, "depth": DEPTH} for engine in engines]
    config = yaml.safe_load((CONFIGS / "benchmarks" / "exports-smollm2.yaml").read_text(encoding="utf-8"))
    config |= {"peers": peers, "num_questions": 4, "max_new_tokens": 48, "environments": str(environments)}
    (tmp_path / "peers.yaml").write_text(yaml.safe_dump(config))
    run("benchmark", "peers", str(tmp_path / "peers.yaml"), "--json", str(tmp_path / "peers.json"))
    rows = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))["rows"]
    assert [row["failure"] for row in rows] == [None] * len(rows)
    assert [row["equal_texts"] for row in rows] == [4] * len(rows)
    ours: dict[str, Any] = {}
    for row in rows[2:]:
        if row["engine"] == "moray":
            ours = row
        else:
            assert row["tau"] == pytest.approx(ours["tau"], rel=0.03), (row["engine"], row["drafter"])
