"""Every trainable drafter from one cache, on two data-parallel workers, with a reduced draft vocabulary: it is trained,
loads, decodes losslessly, and the vocabulary is the cache's most frequent tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moray.activations.format.store import CacheStore
from moray.activations.reading.token_counts import token_counts
from moray.cluster.training.configs import DistillConfig
from moray.config import validate
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.distill.tracking.metrics import read_metrics
from moray.drafters.checkpoint import load_drafter
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer
from moray.trees.shapes import DynamicShape

pytestmark = pytest.mark.usefixtures("ray_session")

_LAYER = {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": {"layer": _LAYER},
    "eagle3": {"layer": _LAYER, "ttt_steps": 3},
    "glide": {"layer": _LAYER, "num_cross_heads": 4},
    "medusa": {"num_heads": 3},
    "independent": {"num_layers": 2, "hidden_size": 64, "head_dim": 16, "layer": _LAYER, "embeddings": "copied"},
}
SIZE, STEPS = 100, 12


# Ray Train takes most of the half minute that each costs.
@pytest.mark.soak
@pytest.mark.parametrize("kind", DRAFTERS)
def test_one_cache_trains_it(kind: str, tiny_target: Path, tiny_cache: Path, tmp_path: Path) -> None:
    from moray.cluster.training.distill import distill

    config = validate(
        DistillConfig,
        {
            "target": {"model": str(tiny_target)},
            "activations": str(tiny_cache),
            "output": str(tmp_path / kind),
            "drafter": {"type": kind, "draft_vocab_size": SIZE, **DRAFTERS[kind]},
            "losses": {"feature": float(kind == "eagle"), "kl": 1.0, "total_variation": 0.5},
            "optim": {"type": "adamw", "lr": 3e-3},
            "schedule": {"type": "linear", "warmup_steps": 2},
            "train": {"max_steps": STEPS, "batch_tokens": 512, "save_steps": 6, "logging_steps": 1},
            "workers": {"num_workers": 2, "cpus_per_worker": 0.5},
        },
    )
    folder = distill(config)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["loss"] for row in rows[-3:]) < 0.95 * sum(row["loss"] for row in rows[:3])
    assert rows[-1]["tokens"] > rows[0]["tokens"] > 0
    assert rows[-1]["seconds"] > 0

    target = Target.load(TargetConfig(model=str(tiny_target), device="cpu"))
    drafter = load_drafter(folder, TargetHead.of(target), ChatTokenizer.load(str(tiny_target)).fingerprint)
    counts = torch.from_numpy(token_counts(CacheStore(str(tiny_cache)), target.spec.vocab_size))
    assert drafter.vocabulary.tokens is not None
    assert int(counts[drafter.vocabulary.tokens].sum()) == int(counts.topk(SIZE).values.sum())
    shape = DynamicShape(type="dynamic", depth=3, breadth=3, nodes=8)
    prompt = list(range(5, 25))
    plain = PlainDecoder(target, 200).generate(prompt, SamplingParams(), 30, ()).tokens
    assert SpeculativeDecoder(target, drafter, shape, 200).generate(prompt, SamplingParams(), 30, ()).tokens == plain
