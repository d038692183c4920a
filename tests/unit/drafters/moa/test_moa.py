"""MoA against its definition, written out token by token and head by head in float64 (design: moa.md)."""

import pytest
import torch
from reference import Reference, scrambled
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target
from torch import Tensor

from moray.distill.masks import verified_start
from moray.drafters.learner import DraftView
from moray.drafters.moa.moa import MoA
from moray.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("moa"), num_hidden_layers=3, hidden_size=32)


@pytest.fixture(scope="module")
def drafter(tiny) -> MoA:
    drafter = scrambled(build(tiny, VARIANTS["moa-0"]))
    assert isinstance(drafter, MoA)
    return drafter


class MoAReference(Reference):
    """The formulas of MoA for one sequence."""

    def __init__(self, drafter: MoA) -> None:
        super().__init__(drafter, fused=("lsa.attention", "sa.attention"))
        self.config = drafter.config

    def layer(self, part: str, x: Tensor, position: int, normed: list[tuple[int, Tensor]], theta: float) -> Tensor:
        """One position's attention over normed (position, vector) sources, with the residual, then the MLP."""
        block = {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}[part]
        attention = f"{part}.attention"
        head_dim = self.weights[f"{attention}.q_proj.weight"].shape[0] // getattr(self.config, block).num_heads
        sources = [self.source(attention, vector, at, head_dim, theta) for at, vector in normed]
        x = x + self.attend(attention, self.norm(f"{part}.input_norm", x), position, sources, theta)
        return x + self.mlp(f"{part}.mlp", self.norm(f"{part}.mlp_norm", x))

    def memory(self, kv: Tensor) -> Tensor:
        """m_t of one token: attention over its layers, mean, projection."""
        layers = [(i, self.norm("lsa.input_norm", row)) for i, row in enumerate(kv)]
        mixed = [self.layer("lsa", row, i, layers, 10_000.0) for i, row in enumerate(kv)]
        return self.linear("to_memory", torch.stack(mixed).mean(0))

    def predict(self, tokens: list[int], kv: Tensor, start: int) -> Tensor:
        """The feature at the last of `tokens`, with memory up to `start`."""
        embedded = [self.embedding[token] for token in tokens]
        position = len(tokens) - 1
        known = [(i, self.norm("sa.input_norm", x)) for i, x in enumerate(embedded)]
        x = self.layer("sa", embedded[-1], position, known, self.rope_theta)
        memory = [(i, self.norm("ca.input_norm", self.memory(kv[i]))) for i in range(start + 1)]
        return self.layer("ca", x, position, memory, self.rope_theta)


def test_features_are_those_of_the_definition(tiny, drafter):
    check_features(tiny, drafter)


def test_with_a_stride_they_are_those_of_every_other_layer(tiny):
    config = VARIANTS["moa-0"].model_copy(update={"layer_stride": 2})
    drafter = scrambled(build(tiny, config))
    assert drafter.needs.kv_layers == drafter.observed.kv_layers == (0, 2)
    check_features(tiny, drafter)


def test_layer_self_attention_skips_layers_that_only_target_layer_inference_reads(tiny):
    drafter = build(tiny, VARIANTS["moa-2"])
    assert drafter.needs.kv_layers == (0, 1, 2)
    taps = batch_of(tiny.target, [tiny.prompt(3, 12)], 5, drafter.needs).taps
    before = drafter.observe(taps)["cross"]
    taps.kv[:, :, 1] = 1.0
    assert torch.equal(drafter.observe(taps)["cross"], before)
    taps.kv[:, :, 0] = 1.0
    assert not torch.equal(drafter.observe(taps)["cross"], before)


def test_a_stride_over_more_layers_than_there_are_is_refused(tiny):
    config = VARIANTS["moa-0"].model_copy(update={"layer_stride": 4})
    with pytest.raises(ConfigError, match=r"drafter.layer_stride is 4, .* 1 to 3 are accepted"):
        build(tiny, config)


def check_features(tiny: TinyTarget, drafter: MoA) -> None:
    length = 12
    batch = batch_of(tiny.target, [tiny.prompt(3, length)], 5, drafter.needs)
    start = verified_start(batch.response_mask, torch.tensor([3]), torch.tensor([1]))
    with torch.no_grad():
        predicted = drafter(batch, DraftView(start, torch.zeros(1, dtype=torch.bool))).predictions[0].hidden[0].double()
    reference = MoAReference(drafter)
    kv, tokens = batch.taps.kv[0].double(), batch.tokens[0].tolist()
    assert len(set(start[0].tolist())) > 3
    for i in range(length):
        wanted = reference.predict(tokens[: i + 1], kv, int(start[0, i]))
        torch.testing.assert_close(predicted[i], wanted, rtol=2e-4, atol=2e-4)
