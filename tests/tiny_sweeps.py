"""The distillation that the sweeps of the tests on Ray share: a small drafter for the tiny target."""

import json
from pathlib import Path
from typing import Any

import yaml

BLOCK = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}
STEP_TOKENS = 512


def write_distill(folder: Path, target: Path, cache: Path, **train: Any) -> Path:
    """Write distill.yaml, which lacks an output; `train` replaces settings of the training."""
    settings = {"epochs": 2, "batch_tokens": STEP_TOKENS, "save_steps": 100, "logging_steps": 2}
    distill = {
        "target": {"model": str(target)},
        "activations": str(cache),
        "drafter": {
            "type": "moa",
            "target_layers": 0,
            "layer_self_attention": BLOCK,
            "self_attention": BLOCK,
            "cross_attention": BLOCK,
        },
        "optim": {"type": "muon", "lr": 0.02, "vector_lr": 0.003},
        "schedule": {"type": "linear", "warmup_steps": 3},
        "train": settings | train,
    }
    (folder / "distill.yaml").write_text(yaml.safe_dump(distill))
    return folder / "distill.yaml"


def write_questions(folder: Path, *prompts: str) -> Path:
    """Write questions.jsonl."""
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path
