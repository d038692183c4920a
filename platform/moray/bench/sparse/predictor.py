"""Trains a predictor of accepted nodes (see `targets.sparse.predictor`) on drafts of real answers."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from moray.bench.sparse.configs import PredictorConfig
from moray.bench.sparse.node_pairs import Pairs, collect_pairs, first_questions
from moray.drafters.loading import load_drafters
from moray.errors import ConfigError
from moray.progress import Progress
from moray.targets.model import Target
from moray.targets.sparse.predictor import Predictor
from moray.targets.sparse.target import SparseTarget
from moray.text import ChatTokenizer

_WEIGHT_DECAY = 1e-3
_MAX_ITERATIONS = 200


def train_predictor(config: PredictorConfig) -> dict[str, Any]:
    """Collect drafts, fit, test on held-out prompts, and save the predictor in the target's folder.

    Returns:
        figures: nodes, share accepted, and held-out AUC.

    Raises:
        ConfigError: the target is dense, or has no such layer.
        DataError: the drafts do not suffice.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
    with Progress(f"load target {config.target.model}"):
        target = Target.load(config.target)
    if not isinstance(target, SparseTarget):
        raise ConfigError(f"target.model '{config.target.model}' is dense: give a target made by pipelines.sparsify")
    if config.layer >= target.spec.num_layers:
        raise ConfigError(f"layer is {config.layer}; the target has {target.spec.num_layers}: give a smaller one")
    ((_, drafter),) = load_drafters((config.drafter,), target, tokenizer).items()
    prompts = list(first_questions(config.chats, tokenizer, config.skip_chats, config.max_chats))
    pairs = collect_pairs(
        target,
        drafter,
        config.tree,
        config.layer,
        prompts,
        config.max_new_tokens,
        config.num_nodes,
        [*target.eos_ids, *tokenizer.eos_ids],
    )
    train, test = pairs.split(config.held_out)
    predictor = fit(train, config.layer, target.spec.fingerprint)
    scores = torch.tensor(predictor.probabilities(test.hidden))
    predictor = replace(predictor, auc=auc(scores, test.is_accepted))
    predictor.save(target.folder)
    return {
        "layer": config.layer,
        "num_nodes": pairs.num_nodes,
        "num_held_out": len(test.is_accepted),
        "share_accepted": float(test.is_accepted.float().mean()),
        "mean_probability": float(scores.mean()),
        "auc": predictor.auc,
    }


def fit(pairs: Pairs, layer: int, fingerprint: str) -> Predictor:
    """Logistic regression with weight decay, on hidden states scaled to unit variance."""
    mean, scale = pairs.hidden.mean(dim=0), pairs.hidden.std(dim=0).clamp(min=1e-6)
    x, y = (pairs.hidden - mean) / scale, pairs.is_accepted.float()
    weight = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=_MAX_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        found = F.binary_cross_entropy_with_logits(x @ weight + bias, y) + _WEIGHT_DECAY * weight.square().sum()
        found.backward()
        return found

    optimiser.step(loss)  # pyright: ignore[reportArgumentType]
    own = (weight / scale).detach()
    return Predictor(layer, own, (bias - mean @ own).detach(), fingerprint)


def auc(scores: Float[Tensor, " nodes"], is_accepted: Bool[Tensor, " nodes"]) -> float:
    """Probability that an accepted node scores higher than a refused one; ties count half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]
    num_accepted = int(is_accepted.sum())
    num_refused = len(scores) - num_accepted
    above = float(ranks[is_accepted].double().sum()) - num_accepted * (num_accepted + 1) / 2
    return above / (num_accepted * num_refused)
