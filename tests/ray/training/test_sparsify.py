"""A target is made sparse on Ray Train: routers learn to skip, and the folder loads as any other target."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moray.activations.capture.record import KVRecorder
from moray.cluster.training.configs import SparsifyConfig
from moray.cluster.training.resume import is_complete
from moray.cluster.training.sparsify import write_target
from moray.config import validate
from moray.distill.tracking.metrics import read_metrics
from moray.provenance import read_run_yaml
from moray.targets.model import Target
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def values(tiny_target: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "target": {"model": str(tiny_target)},
        "activations": str(tiny_cache),
        "output": str(tmp_path_factory.mktemp("sparsify") / "sparse"),
        "sparse": {"first_layer": 1, "router_size": 16, "lora_rank": 2, "share": 0.6, "share_weight": 20.0},
        "losses": {"feature": 0.0, "kl": 1.0},
        "optim": {"type": "adamw", "lr": 0.01},
        "train": {
            "epochs": 4,
            "max_steps": 40,
            "batch_tokens": 512,
            "save_steps": 20,
            "logging_steps": 4,
            "precision": "auto",
        },
    }


@pytest.fixture(scope="module")
def unbroken(values: dict[str, Any]) -> SparsifyConfig:
    """A run that nothing disturbs."""
    from moray.cluster.training.distill import distill

    config = validate(SparsifyConfig, values)
    assert not is_complete(config)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        distill(config)
    assert "sparse: train.precision: " in said.getvalue(), "the chosen precision is printed"
    return config


def test_the_share_of_layers_falls_to_what_was_asked_for(
    unbroken: SparsifyConfig, values: dict[str, Any], tiny_target: Path
) -> None:
    config = unbroken
    recorded = read_run_yaml(Path(config.output))["config"]["train"]["precision"]
    assert recorded in ("float32", "bfloat16"), "a run keeps the precision that it began with"
    explicit = validate(SparsifyConfig, values | {"train": values["train"] | {"precision": recorded}})
    assert is_complete(explicit)
    assert is_complete(config), "the same command finds it complete"
    assert all(row["loss"] < 100 for row in read_metrics(Path(config.output)))
    write_target(config)
    target = Target.load(TargetConfig(model=config.output, device="cpu"))
    assert isinstance(target, SparseTarget)
    assert target.spec.fingerprint != Target.load(TargetConfig(model=str(tiny_target), device="cpu")).spec.fingerprint
    prompt = ChatTokenizer.load(config.output).encode_prompt(
        [{"role": "user", "content": "one two three four five six"}]
    )
    tokens = torch.tensor([prompt * 4])
    positions = torch.arange(tokens.shape[1])[None]
    output = target.forward(tokens, positions, None, KVRecorder(target, ()))
    assert output.routes is not None
    # 90 % at first, and 25 % if no router let any token through. The text is unlike the chats, so the share is not
    # as close to 60 % as theirs.
    assert 0.27 < output.routes.float().mean() < 0.8


def test_a_run_that_was_killed_goes_on_to_the_same_weights(unbroken: SparsifyConfig) -> None:
    """All but the first checkpoint is taken away, as if the run had been killed after it."""
    from moray.cluster.training.distill import distill

    config = unbroken
    output = Path(config.output)
    weights, rows = load_file(output / "drafter.safetensors"), (output / "metrics.jsonl").read_text()
    keep_first_checkpoint(output)
    assert not is_complete(config)
    distill(config)
    assert (output / "metrics.jsonl").read_text().splitlines()[-1] != rows.splitlines()[-1], "it trained again"
    assert [row["step"] for row in read_metrics(output)] == [json.loads(row)["step"] for row in rows.splitlines()]
    again = load_file(output / "drafter.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert is_complete(config)


def keep_first_checkpoint(output: Path) -> None:
    """Make a finished run look like one that was killed after its first checkpoint."""
    (output / "drafter.json").unlink()
    snapshot = output / "ray" / "train" / "checkpoint_manager_snapshot.json"
    state = json.loads(snapshot.read_text())
    first, *later = state["checkpoint_results"]
    assert later, "one checkpoint is left to go on from"
    for result in later:
        shutil.rmtree(snapshot.parent / result["checkpoint_dir_name"])
    state |= {
        "checkpoint_results": [first],
        "latest_checkpoint_result": first,
        "checkpoint_report_indices": state["checkpoint_report_indices"][:1],
        "current_report_index": state["checkpoint_report_indices"][0],
        "pending_training_results": [],
        "pending_validation_specs": [],
    }
    snapshot.write_text(json.dumps(state))
