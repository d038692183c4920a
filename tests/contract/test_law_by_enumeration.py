"""The rejection method exactly: every decision enumerated instead of sampled."""

from itertools import product

import pytest
import torch
from laws import CPU, REJECTION
from one_tree import grow

from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.sampler import Sampler
from moray.trees.shapes import FixedShape

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


class _Scripted(Sampler):
    """Answers tests from a script of accept or refuse, and keeps the probability of having done so."""

    def __init__(self, vocabulary: int, script: list[bool]) -> None:
        super().__init__(REJECTION, vocabulary, CPU)
        self.script = script
        self.probability = 1.0
        self.asked = 0

    def uniform(self, stream, position, size):
        if stream == accept_module.STREAM_TEST:
            return [_Test(self) for _ in range(size)]
        return torch.full((size,), 0.5, dtype=torch.float64)


class _Test:
    """A uniform number of which only `u * q < p` is asked."""

    def __init__(self, sampler: _Scripted, q: float = 1.0) -> None:
        self._sampler, self._q = sampler, q

    def __mul__(self, q):
        return _Test(self._sampler, float(q))

    def __lt__(self, p):
        sampler = self._sampler
        accepts = sampler.script[sampler.asked] if sampler.asked < len(sampler.script) else False
        sampler.asked += 1
        chance = min(1.0, float(p) / self._q)
        sampler.probability *= chance if accepts else 1.0 - chance
        return accepts


def exact_law_of_first_token(p: torch.Tensor, q: torch.Tensor, children: tuple[int, ...], monkeypatch) -> torch.Tensor:
    """Law of the first emitted token given these children of the root: all scripts of at most one acceptance."""
    residuals = []

    class Noise:
        def __radd__(self, log_p):
            residuals.append(log_p.exp())
            return log_p

    monkeypatch.setattr(accept_module, "gumbel", lambda uniform: Noise())
    tree = grow(
        torch.tensor([0]),
        FixedShape(type="fixed", branching=(len(children),)),
        lambda tokens, ancestors, depth: q.log()[None],
        lambda logits, depth, k: (torch.tensor([children]), q.log()[list(children)][None], q[None]),
    )
    law = torch.zeros_like(p)
    probs = torch.stack([p] * tree.num_nodes)
    for place in range(len(children) + 1):
        sampler = _Scripted(len(p), [False] * place + [True])
        result = accept_module.accept_by_rejection(tree, probs, sampler, 0)
        if place < len(children):
            assert result.tokens == [children[place]] or sampler.probability == 0
            law[children[place]] += sampler.probability
        elif sampler.probability > 0:
            law += sampler.probability * residuals[-1]
    return law


@pytest.mark.parametrize("num_children", [1, 2, 3])
def test_rejection_is_exact_by_enumeration(num_children, monkeypatch):
    """Sum over all draws from q of (their probability) x (exact law given them) = p, to rounding."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        p, q = torch.rand(2, 4, generator=generator, dtype=torch.float64).pow(2).unbind()
        p, q = p / p.sum(), q / q.sum()
        law = torch.zeros_like(p)
        for children in product(range(4), repeat=num_children):
            chance = q[list(children)].prod()
            law += chance * exact_law_of_first_token(p, q, children, monkeypatch)
        torch.testing.assert_close(law, p, atol=1e-12, rtol=0)
