"""Naive float64 arithmetic for tests: one position, one head, one source at a time, written from the papers.

Knows a drafter's weights by their names and nothing of its code.
"""

import math

import torch
from torch import Tensor

from moray.drafters.base import Drafter

Source = tuple[Tensor, Tensor]
"""Key and value of one position, each [kv_heads, head_dim]."""


class Reference:
    """The building blocks of decoder layers; tests of each drafter put them together."""

    def __init__(self, drafter: Drafter, fused: tuple[str, ...] = ()) -> None:
        """`fused` names attentions whose one matrix holds queries first, then keys, then values."""
        self.weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
        for part in fused:
            joint = self.weights.pop(f"{part}.qkv_proj.weight")
            rows = self.weights[f"{part}.o_proj.weight"].shape[1]
            self.weights[f"{part}.q_proj.weight"] = joint[:rows]
            self.weights[f"{part}.kv_proj.weight"] = joint[rows:]
        self.eps, self.rope_theta = drafter.spec.norm_eps, drafter.spec.rope_theta
        self.embedding = drafter.head.embed(torch.arange(drafter.spec.vocab_size)).double()
        self.lm_head = drafter.head.weight.double()

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.gate_up", x).chunk(2)
        return self.linear(f"{name}.down", gate * torch.sigmoid(gate) * up)

    def source(self, part: str, x: Tensor, position: int, head_dim: int, theta: float) -> Source:
        """Key and value of a normed vector."""
        key, value = self.linear(f"{part}.kv_proj", x).view(2, -1, head_dim)
        return torch.stack([rotated(head, position, theta) for head in key]), value

    def attend(self, part: str, x: Tensor, position: int, sources: list[Source], theta: float) -> Tensor:
        """What a normed vector reads, projected back."""
        head_dim = sources[0][0].shape[1]
        queries = self.linear(f"{part}.q_proj", x).view(-1, head_dim)
        return self.linear(f"{part}.o_proj", attention([rotated(q, position, theta) for q in queries], sources))


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Neighbouring pairs of one head turned by position * theta ** (-2k / d)."""
    out = x.clone()
    for k in range(len(x) // 2):
        angle = position * theta ** (-2 * k / len(x))
        out[2 * k] = x[2 * k] * math.cos(angle) - x[2 * k + 1] * math.sin(angle)
        out[2 * k + 1] = x[2 * k] * math.sin(angle) + x[2 * k + 1] * math.cos(angle)
    return out


def attention(queries: list[Tensor], sources: list[Source]) -> Tensor:
    """Softmax attention of one position, head by head; neighbouring query heads share a key head."""
    num_kv_heads = sources[0][0].shape[0]
    outputs = []
    for head, query in enumerate(queries):
        group = head // (len(queries) // num_kv_heads)
        scores = torch.stack([query @ key[group] / math.sqrt(len(query)) for key, _ in sources])
        outputs.append(sum(share * value[group] for share, (_, value) in zip(scores.softmax(0), sources, strict=True)))
    return torch.cat(outputs)


def scrambled(drafter: Drafter, size: float = 0.3) -> Drafter:
    """No weight at its initial value: a norm or a bias that is left out must show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return drafter
