"""Real answers with every drafter follow the target's law, on chains and trees: chi-square, vocabulary of four."""

import pytest
import torch
from in_turn import in_turn
from laws import COUPLING, REJECTION, answers_keep_the_law
from tiny_drafters import UNTRAINED, build, union_members
from tiny_targets import TinyTarget

from moray.decoding.engine import engine as engine_module
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.accept import Accepted
from moray.drafters.base import Drafter
from moray.drafters.configs import DRAFTER_CONFIG
from moray.trees.shapes import AdaptiveShape, ChainShape, FixedShape

_SMALL = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
CONFIGS = {
    "moa": {
        "target_layers": 0,
        "layer_self_attention": {"num_heads": 1, "num_kv_heads": 1, "intermediate_size": 16},
        "self_attention": _SMALL,
        "cross_attention": _SMALL,
    },
    "dynamic-moa": {
        "target_layers": (0, 1),
        "layer_self_attention": {"num_heads": 1, "num_kv_heads": 1, "intermediate_size": 16},
        "self_attention": _SMALL,
        "cross_attention": _SMALL,
    },
    "eagle": {"layer": _SMALL},
    "eagle3": {"layer": _SMALL, "ttt_steps": 2},
    "glide": {"layer": _SMALL, "num_cross_heads": 2},
    "medusa": {"num_heads": 2, "draft_vocab_size": 3},
    "independent": {"hidden_size": 16, "head_dim": 8, "layer": _SMALL, "draft_vocab_size": 3},
    "pretrained": {"model": "made by build()"},
    "ngram": {"max_ngram": 2},
}
SHORT_SHAPES = {
    "chain": ChainShape(type="chain", depth=2),
    "tree": FixedShape(type="fixed", branching=(2, 2)),
    "adaptive": AdaptiveShape(type="adaptive", depth=2),
}
SAMPLES = 350

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def drafter_of(tiny: TinyTarget, kind: str) -> Drafter:
    """A drafter far from the target: weights large enough that its distributions are not flat."""
    drafter = build(tiny, DRAFTER_CONFIG.validate_python({"type": kind, **CONFIGS[kind]}), seed=3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return drafter


def keeps_the_law(tiny: TinyTarget, kind: str, shape: str, params: SamplingParams) -> bool:
    return answers_keep_the_law(tiny, SHORT_SHAPES[shape], params, drafter_of(tiny, kind), SAMPLES)


@pytest.fixture
def target(request, kind) -> TinyTarget:
    return request.getfixturevalue("four_tokens_two_layers" if kind == "dynamic-moa" else "four_tokens")


def test_every_drafter_is_here():
    assert set(CONFIGS) == union_members() >= set(UNTRAINED)


@in_turn(("kind", "shape"), [*CONFIGS], [*SHORT_SHAPES], whole=["moa"])
def test_rejection_sampling_keeps_the_target_s_law(target, kind, shape):
    assert keeps_the_law(target, kind, shape, REJECTION)


@pytest.mark.parametrize("kind", ["moa", "dynamic-moa", "ngram"])
def test_coupled_sampling_keeps_the_target_s_law(target, kind):
    assert keeps_the_law(target, kind, "tree", COUPLING)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "ngram"])
def test_a_verifier_that_believes_the_drafter_is_caught(target, kind, monkeypatch):
    """The same check on a biased verifier, which takes every first draft token as it comes."""
    accept = accept_module.accept

    def believe(tree, logits, sampler, root_position) -> Accepted:
        if tree.max_depth == 0:
            return accept(tree, logits, sampler, root_position)
        noise = sampler.noise(root_position + 2, 1)
        chosen = int((sampler.log_probs(logits[1:2]) + noise).argmax())
        return Accepted([1], [int(tree.tokens[1])], chosen)

    monkeypatch.setattr(engine_module, "accept_rows", accept_module.row_by_row(believe))
    assert not keeps_the_law(target, kind, "chain", REJECTION)
