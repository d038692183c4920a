"""Writes a trained sparse target as an ordinary model folder, with its routers beside it.

Low-rank changes are added to the weights. Layers that a baseline drops are left out, and the others renumbered.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from moray.distill.sparse.calibrate import calibrate_share
from moray.distill.sparse.configs import SparseConfig
from moray.distill.sparse.learner import LowRank, SparseLearner
from moray.targets.loading import load_causal_lm
from moray.targets.model import Target
from moray.targets.sparse.routing import save_routers
from moray.targets.sparse.target import SparseTarget
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer


@torch.no_grad()
def write_sparse_target(
    folder: Path,
    target: TargetConfig,
    config: SparseConfig,
    learner: SparseLearner,
    chats: Sequence[Sequence[int]] = (),
) -> None:
    """Write config, weights, tokenizer and routers into a folder.

    Args:
        folder: of the new target; files of a training run there are left alone.
        target: the dense one.
        config: of the run.
        learner: what it has learnt.
        chats: token ids on which the routers are calibrated; none leaves them as trained.
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
            if chats:
                _calibrate(made, target, config, chats)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)  # config.json last: it says that the target is whole


def _calibrate(folder: str, target: TargetConfig, config: SparseConfig, chats: Sequence[Sequence[int]]) -> None:
    """Shift the routers of the target in a folder until it runs the share of its layers that was asked for."""
    sparse = Target.load(TargetConfig(model=folder, dtype="float32", device=target.device, template=target.template))
    assert isinstance(sparse, SparseTarget)
    share = calibrate_share(sparse, chats, config.share)
    save_routers(Path(folder), nn.ModuleDict({str(n): router for n, router in sparse.routers.items()}), config.routing)
    print(
        f"calibrated on {len(chats)} chats: a token runs through {share:.3f} of the layers, asked for {config.share:g}"
    )
