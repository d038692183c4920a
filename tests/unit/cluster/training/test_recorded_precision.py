"""A run keeps the precision that train.precision=auto chose when it began."""

from pathlib import Path
from typing import Any

import yaml

from moray.cluster.training.configs import SparsifyConfig
from moray.cluster.training.resume import with_recorded_precision
from moray.config import validate
from moray.provenance import RUN_FILE


def config_of(output: Path, precision: str) -> SparsifyConfig:
    values: dict[str, Any] = {
        "target": {"model": "TARGET"},
        "activations": "CACHE",
        "output": str(output),
        "losses": {"feature": 0.0, "kl": 1.0},
        "optim": {"type": "adamw"},
        "train": {"precision": precision},
    }
    return validate(SparsifyConfig, values)


def test_auto_stands_for_what_the_run_began_with(tmp_path):
    assert with_recorded_precision(config_of(tmp_path, "auto")).train.precision == "auto", "nothing has begun"
    began = config_of(tmp_path, "bfloat16").model_dump(mode="json")
    (tmp_path / RUN_FILE).write_text(yaml.safe_dump({"config": began}))
    assert with_recorded_precision(config_of(tmp_path, "auto")).train.precision == "bfloat16"
    assert with_recorded_precision(config_of(tmp_path, "float32")).train.precision == "float32", "that is a mismatch"
