"""MoA against its definition, written out token by token and head by head in float64 (design: moa.md)."""

import math

import pytest
import torch
from support import VARIANTS, TinyTarget, batch_of, build, load_target
from torch import Tensor

from moray.distill.masks import verified_start
from moray.drafters.base import DraftView
from moray.drafters.moa import MoA


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("moa"), num_hidden_layers=3, hidden_size=32)


@pytest.fixture(scope="module")
def drafter(tiny) -> MoA:
    """No weight at its initial value: a norm or a bias that is left out must show."""
    drafter = build(tiny, VARIANTS["moa-0"])
    assert isinstance(drafter, MoA)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return drafter


class Reference:
    """The formulas of MoA for one sequence; knows weights by name and nothing of the drafter's code."""

    def __init__(self, drafter: MoA) -> None:
        self.weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
        for part in ("lsa", "sa"):  # queries first, then keys and values
            joint = self.weights.pop(f"{part}.attention.qkv_proj.weight")
            rows = len(self.weights[f"{part}.attention.o_proj.weight"].T)
            self.weights[f"{part}.attention.q_proj.weight"] = joint[:rows]
            self.weights[f"{part}.attention.kv_proj.weight"] = joint[rows:]
        self.config, self.eps = drafter.config, drafter.spec.norm_eps
        self.embedding = drafter.head._embed_tokens.weight.double()
        self.rope_theta = drafter.spec.rope_theta

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def rotate(self, x: Tensor, position: int, theta: float) -> Tensor:
        """Turn neighbouring pairs of one head by position * theta ** (-2k / d)."""
        out = x.clone()
        for k in range(len(x) // 2):
            angle = position * theta ** (-2 * k / len(x))
            out[2 * k] = x[2 * k] * math.cos(angle) - x[2 * k + 1] * math.sin(angle)
            out[2 * k + 1] = x[2 * k] * math.sin(angle) + x[2 * k + 1] * math.cos(angle)
        return out

    def attend(self, part: str, x: Tensor, position: int, sources: list[tuple[int, Tensor]], theta: float) -> Tensor:
        """One position's attention over normed (position, vector) sources, with the residual, then the MLP."""
        block = {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}[part]
        sizes = getattr(self.config, block)
        query = self.linear(f"{part}.attention.q_proj", self.norm(f"{part}.input_norm", x))
        head_dim = len(query) // sizes.num_heads
        half = sizes.num_kv_heads * head_dim
        projected = [(at, self.linear(f"{part}.attention.kv_proj", source)) for at, source in sources]
        outputs = []
        for head in range(sizes.num_heads):
            group = head // (sizes.num_heads // sizes.num_kv_heads)
            here = slice(group * head_dim, (group + 1) * head_dim)
            turned = self.rotate(query[head * head_dim : (head + 1) * head_dim], position, theta)
            scores = [turned @ self.rotate(kv[:half][here], at, theta) / math.sqrt(head_dim) for at, kv in projected]
            shares = torch.stack(scores).softmax(0)
            outputs.append(sum(share * kv[half:][here] for share, (_, kv) in zip(shares, projected, strict=True)))
        x = x + self.linear(f"{part}.attention.o_proj", torch.cat(outputs))
        gate, up = self.linear(f"{part}.mlp.gate_up", self.norm(f"{part}.mlp_norm", x)).chunk(2)
        return x + self.linear(f"{part}.mlp.down", gate * torch.sigmoid(gate) * up)

    def memory(self, kv: Tensor) -> Tensor:
        """m_t of one token: attention over its layers, mean, projection."""
        layers = [(i, self.norm("lsa.input_norm", row)) for i, row in enumerate(kv)]
        mixed = [self.attend("lsa", row, i, layers, 10_000.0) for i, row in enumerate(kv)]
        return self.linear("to_memory", torch.stack(mixed).mean(0))

    def predict(self, tokens: list[int], kv: Tensor, start: int) -> Tensor:
        """The feature at the last of `tokens`, with memory up to `start`."""
        embedded = [self.embedding[token] for token in tokens]
        position = len(tokens) - 1
        known = [(i, self.norm("sa.input_norm", x)) for i, x in enumerate(embedded)]
        x = self.attend("sa", embedded[-1], position, known, self.rope_theta)
        memory = [(i, self.norm("ca.input_norm", self.memory(kv[i]))) for i in range(start + 1)]
        return self.attend("ca", x, position, memory, self.rope_theta)


def test_features_are_those_of_the_definition(tiny, drafter):
    length = 12
    batch = batch_of(tiny.target, [tiny.prompt(3, length)], 5, drafter.needs)
    start = verified_start(batch.response_mask, torch.tensor([3]), torch.tensor([1]))
    with torch.no_grad():
        predicted = drafter(batch, DraftView(start, torch.zeros(1, dtype=torch.bool))).predictions[0].hidden[0].double()
    reference = Reference(drafter)
    kv, tokens = batch.taps.kv[0].double(), batch.tokens[0].tolist()
    assert len(set(start[0].tolist())) > 3
    for i in range(length):
        wanted = reference.predict(tokens[: i + 1], kv, int(start[0, i]))
        torch.testing.assert_close(predicted[i], wanted, rtol=2e-4, atol=2e-4)
