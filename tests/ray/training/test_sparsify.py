"""A target is made sparse on Ray Train: routers learn to skip, and the folder loads as any other target."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_the_share_of_layers_falls_to_what_was_asked_for(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from moray.cluster.training.distill import distill

    values: dict[str, Any] = {
        "target": {"model": str(tiny_target)},
        "activations": str(tiny_cache),
        "output": str(tmp_path / "sparse"),
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
    config = validate(SparsifyConfig, values)
    assert not is_complete(config)
    distill(config)
    assert "sparse: train.precision: " in "".join(capfd.readouterr()), "the chosen precision is printed"
    recorded = read_run_yaml(tmp_path / "sparse")["config"]["train"]["precision"]
    assert recorded in ("float32", "bfloat16"), "a run keeps the precision that it began with"
    explicit = validate(SparsifyConfig, values | {"train": values["train"] | {"precision": recorded}})
    assert is_complete(explicit)
    assert is_complete(config), "the same command finds it complete"
    assert all(row["loss"] < 100 for row in read_metrics(tmp_path / "sparse"))
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
