"""The first real input: a pretrained model that Moray did not make, with chats of its own distribution."""

import json
import shutil
from pathlib import Path

import pytest

from moray.config import load_config
from pipelines import cache_activations, distill, evaluate

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

REPOSITORY = Path(__file__).resolve().parents[3]
NUM_HELD_OUT = 40


def test_the_chain_on_a_real_pretrained_model_is_lossless(shared_data: Path, tmp_path: Path, ray_session: None) -> None:
    """stories3M-hf with its own stories: cache, distill, evaluate on stories that were not trained on."""
    model = shared_data / "models/stories3M-hf"
    lines = (shared_data / "chats/stories3M_selfgen.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
    (tmp_path / "train.jsonl").write_text("\n".join(lines[NUM_HELD_OUT:]), encoding="utf-8")
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines[:NUM_HELD_OUT]), encoding="utf-8")
    template = REPOSITORY / "configs/templates/continuation.jinja"
    target = [f"target.model={model}", f"target.template={template}"]
    caching = ["cache.max_length=512", "cache.batch_tokens=4096", "cache.shard_mib=64", "capture.num_targets=2"]
    run(
        cache_activations,
        [*target, f"chats.path={tmp_path}/train.jsonl", f"output={tmp_path}/activations", *caching],
    )
    drafter = REPOSITORY / "configs/drafters/moa-stories.yaml"
    run(
        distill,
        [str(drafter), *target, f"activations={tmp_path}/activations", f"output={tmp_path}/moa", "train.epochs=1"],
    )
    shutil.rmtree(tmp_path / "activations")
    trees = "trees=[{type: chain, depth: 5}, {type: dynamic, depth: 5, breadth: 4, nodes: 16}]"
    asking = [f"questions={tmp_path}/heldout.jsonl", "max_new_tokens=96", "num_questions=10", trees]
    run(evaluate, [*target, f"drafters=[{tmp_path}/moa]", f"output={tmp_path}/report", *asking])
    rows = json.loads((tmp_path / "report/report.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 2
    assert all(row["lossless"] for row in rows)
    assert all(row["num_prompts"] == 10 for row in rows)
    assert min(row["tau"] for row in rows) > 1.25, "the drafter has learned nothing"


def run(pipeline: object, arguments: list[str]) -> None:
    """Run an entry point in this process, in the Ray session of the tests."""
    pipeline.main(load_config(pipeline.CONFIG, arguments))  # type: ignore[attr-defined]
