"""Writes a trained sparse target as an ordinary model folder, with its routers beside it.

Low-rank changes are added to the weights. Layers that a baseline drops are left out, and the others renumbered.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from moray.distill.sparse.configs import SparseConfig
from moray.distill.sparse.learner import LowRank, SparseLearner
from moray.targets.loading import load_causal_lm
from moray.targets.sparse.routing import save_routers
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer


@torch.no_grad()
def write_sparse_target(folder: Path, target: TargetConfig, config: SparseConfig, learner: SparseLearner) -> None:
    """Write config, weights, tokenizer and routers into a folder.

    Args:
        folder: of the new target; files of a training run there are left alone.
        target: the dense one.
        config: of the run.
        learner: what it has learnt.
    """
    model = load_causal_lm(target.model, torch.float32, torch.device("cpu"))
    for layer, changes in zip(model.model.layers, learner.changes, strict=True):
        assert isinstance(changes, nn.ModuleList)
        attention = layer.self_attn
        for linear, change in zip((attention.q_proj, attention.k_proj, attention.v_proj), changes, strict=False):
            assert isinstance(change, LowRank)
            linear.weight += change.change.float().cpu()
    if config.dropped_layers:
        kept = [one for index, one in enumerate(model.model.layers) if index not in config.dropped_layers]
        model.model.layers = nn.ModuleList(kept)
        model.config.num_hidden_layers = len(kept)
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = [
                kind for index, kind in enumerate(model.config.layer_types) if index not in config.dropped_layers
            ]
    tokenizer = ChatTokenizer.load(target.model, target.template).tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tokenizer.save_pretrained(made)
        model.save_pretrained(made)
        if config.has_routers:
            save_routers(Path(made), learner.routers, config.routing)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)  # config.json last: it says that the target is whole
