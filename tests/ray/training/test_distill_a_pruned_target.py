"""`pipelines.prune` and then `pipelines.distill`: what is pruned starts from what the target knows."""

from pathlib import Path

import pytest

from moray.cluster.training.configs import DistillConfig
from moray.config import validate
from moray.distill.pruning.config import PruneConfig
from moray.distill.tracking.metrics import read_metrics
from moray.errors import MismatchError

pytestmark = pytest.mark.usefixtures("ray_session")
DRAFTER = {
    "type": "independent",
    "num_layers": 3,
    "hidden_size": 64,
    "head_dim": 16,
    "layer": {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96},
    "embeddings": "frozen",
}


def _loss(target: Path, cache: Path, output: Path, **init: object) -> float:
    from moray.cluster.training.distill import distill

    values = {"target": {"model": str(target)}, "activations": str(cache), "output": str(output), "drafter": DRAFTER}
    values |= {
        "train": {"max_steps": 2, "batch_tokens": 512, "save_steps": 10, "logging_steps": 1},
        "losses": {"feature": 0.0, "kl": 1.0},
        "optim": {"type": "adamw", "lr": 1e-4},
        "schedule": {"type": "linear", "warmup_steps": 1},
    }
    distill(validate(DistillConfig, values | init))
    return read_metrics(output)[0]["loss"]


def test_a_pruned_target_starts_with_a_smaller_loss(
    tiny_target: Path, tiny_cache: Path, other_target: Path, tmp_path: Path
) -> None:
    from pipelines.prune import main

    pruned = tmp_path / "pruned"
    settings = {"drafter": DRAFTER, "activations": str(tiny_cache), "output": str(pruned), "num_chats": 8}
    with pytest.raises(MismatchError, match="were cached from a target with fingerprint"):
        main(validate(PruneConfig, {"target": {"model": str(other_target)}} | settings))
    main(validate(PruneConfig, {"target": {"model": str(tiny_target)}} | settings))
    random = _loss(tiny_target, tiny_cache, tmp_path / "random")
    assert _loss(tiny_target, tiny_cache, tmp_path / "further", init={"drafter": str(pruned)}) < 0.7 * random
