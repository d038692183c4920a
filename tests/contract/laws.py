"""Exact laws of texts, and chi-square tests of texts against them.

A check is a function that says whether a verifier passes: each runs on the library and, patched, on verifiers with
one known fault, which must fail the very same check.
"""

from functools import cache
from itertools import product

import torch
from one_tree import grow
from rehearsed import Rehearsed
from scipy.stats import chisquare
from tiny_targets import TinyTarget
from transformers import PreTrainedModel

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.sampler import STREAM_DRAFT, Sampler
from moray.drafters.base import Drafter
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, FixedShape

CPU = torch.device("cpu")
SIGNIFICANCE = 0.01  # seeds are fixed: a check that passes once passes always
ROOT_POSITION = 5
REJECTION = SamplingParams(temperature=1.0, acceptance_method="rejection")
COUPLING = SamplingParams(temperature=1.0, acceptance_method="gumbel_coupled")
SHORT_CHAIN = ChainShape(type="chain", depth=2)
SIBLINGS = FixedShape(type="fixed", branching=(2, 2))
SHORT_DYNAMIC = DynamicShape(type="dynamic", depth=2, breadth=2, nodes=4)
ADAPTIVE_CHAIN = AdaptiveShape(type="adaptive", depth=3)
ADAPTIVE_TREE = AdaptiveShape(type="adaptive", depth=2, breadth=2, nodes=5)
PROMPT = [1, 3, 0]


class TableWorld:
    """Target and drafter as tables [last token, next token] of logits, decoded by the library's own cycle."""

    def __init__(self, vocabulary: int = 3, sharpness: float = 1.2, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.target = torch.randn(vocabulary, vocabulary, generator=generator) * sharpness
        self.drafter = torch.randn(vocabulary, vocabulary, generator=generator) * sharpness

    def generate(self, shape, params: SamplingParams, count: int, siblings: bool = False) -> list[int]:
        """`count` tokens after token 0, in as many cycles as it takes."""
        sampler = Sampler(params, self.vocabulary, CPU)
        tokens = [0]
        while len(tokens) <= count:
            position = ROOT_POSITION + len(tokens) - 1
            select = (
                self._independent_siblings(sampler, position)
                if siblings
                else sampler.selector(position, shape.depth, isinstance(shape, ChainShape))
            )
            tree = grow(torch.tensor(tokens[-1:]), shape, lambda new, ancestors, depth: self.drafter[new], select)
            result = accept_module.accept(tree, self.target[tree.tokens], sampler, position)
            tokens += [*result.tokens, result.next_token]
        return tokens[1 : count + 1]

    def law(self, params: SamplingParams, count: int) -> torch.Tensor:
        """Exact probabilities of all texts of `count` tokens, in the order of `product`."""
        probs = reference_probs(self.target, params)
        law = []
        for text in product(range(self.vocabulary), repeat=count):
            p, last = 1.0, 0
            for token in text:
                p, last = p * float(probs[last, token]), token
            law.append(p)
        return torch.tensor(law, dtype=torch.float64)

    def _independent_siblings(self, sampler: Sampler, root_position: int):
        """SpecInfer: children drawn independently from q, which is handed on."""

        def select(logits, level, children):
            log_q = sampler.log_probs(logits)
            uniform = sampler.uniform(STREAM_DRAFT, root_position + 1 + level, children * self.vocabulary)
            noise = -torch.log(-torch.log(uniform.view(children, 1, self.vocabulary)))
            tokens = (log_q + noise).argmax(dim=-1).T
            return tokens, log_q.gather(1, tokens), log_q.exp()

        return select


def reference_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Filtered probabilities, written plainly: one row and one token at a time."""
    rows = []
    for row in (logits.double() / params.temperature).softmax(dim=-1):
        kept = row.sort(descending=True).indices.tolist()
        if params.top_k:
            kept = kept[: params.top_k]
        mass, total, nucleus = 0.0, float(row[kept].sum()), []
        for token in kept:
            if mass < params.top_p:
                nucleus.append(token)
            mass += float(row[token]) / total
        filtered = torch.zeros_like(row)
        filtered[nucleus] = row[nucleus]
        rows.append(filtered / filtered.sum())
    return torch.stack(rows)


def fits(counts: torch.Tensor, law: torch.Tensor) -> bool:
    """Chi-square at `SIGNIFICANCE`; rare cells are pooled, and an impossible text refutes at once."""
    if bool((counts[law == 0] > 0).any()):
        return False
    expected = law * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    return bool(chisquare(observed[keep], wanted[keep]).pvalue > SIGNIFICANCE)


def counts_of(
    world: TableWorld, shape, params: SamplingParams, samples: int = 800, siblings: bool = False
) -> torch.Tensor:
    """How often each text of three tokens came, one per seed."""
    counts = torch.zeros(world.vocabulary**3, dtype=torch.float64)
    for seed in range(samples):
        a, b, c = world.generate(shape, params.model_copy(update={"seed": seed}), 3, siblings)
        counts[(a * world.vocabulary + b) * world.vocabulary + c] += 1
    return counts


def keeps_the_law(
    shape, params: SamplingParams, siblings: bool = False, world: TableWorld | None = None, samples: int = 1200
) -> bool:
    """Whether texts of three tokens have the target's law."""
    world = world or TableWorld()
    return fits(counts_of(world, shape, params, samples, siblings), world.law(params, 3))


@cache
def law_of_answers(model: PreTrainedModel, params: SamplingParams) -> torch.Tensor:
    """Exact law of the first two tokens, from the model's own forward pass over every text."""
    texts = torch.tensor([[*PROMPT, token] for token in range(4)])
    with torch.no_grad():
        logits = model(texts).logits
    first = reference_probs(logits[:1, -2], params)[0]
    return (first[:, None] * reference_probs(logits[:, -1], params)).flatten()


def decoder_keeps_the_law(
    tiny: TinyTarget, decoder: PlainDecoder | SpeculativeDecoder, params: SamplingParams, samples: int
) -> bool:
    """Whether answers of two tokens by one decoder, one per seed, have the target's law."""
    counts = torch.zeros(16, dtype=torch.float64)
    for seed in range(samples):
        first, second = decoder.generate(PROMPT, params.model_copy(update={"seed": seed}), 2, ()).tokens
        counts[first * 4 + second] += 1
    return fits(counts, law_of_answers(tiny.target.model, params))


def answers_keep_the_law(
    tiny: TinyTarget, shape, params: SamplingParams, drafter: Drafter | None = None, samples: int = 450
) -> bool:
    """Whether speculative answers of two tokens have the target's law; without a drafter, with a noisy target's."""
    decoder = SpeculativeDecoder(tiny.target, drafter or Rehearsed(tiny.target, 1.0), shape, 16)
    return decoder_keeps_the_law(tiny, decoder, params, samples)


def longer_answers(
    tiny: TinyTarget, drafter, shape, params: SamplingParams, prompt: list[int], samples: int = 400
) -> tuple[bool, set[int]]:
    """Whether answers of four tokens have the target's law, token pair by token pair; and the depths drafted."""
    decoder = SpeculativeDecoder(tiny.target, drafter, shape, 24)
    counts, drafted = torch.zeros(4, 4, 4, 4, dtype=torch.float64), set()
    for seed in range(samples):
        generation = decoder.generate(prompt, params.model_copy(update={"seed": seed}), 4, ())
        counts[tuple(generation.tokens)] += 1
        drafted |= set(generation.drafted)
    texts = torch.tensor(list(product(range(4), repeat=3)))
    with torch.no_grad():
        logits = tiny.target.model(torch.cat([torch.tensor(prompt).expand(64, -1), texts], dim=1)).logits
    law = torch.ones(4, 4, 4, 4, dtype=torch.float64)
    for place in range(4):  # law[a, b, c, d] = p(a) p(b|a) p(c|ab) p(d|abc)
        probs = reference_probs(logits[:, place - 4], params).reshape(4, 4, 4, 4)
        if place < 3:
            first = probs[(slice(None),) * place + (0,) * (3 - place)]
            probs = first.reshape(*[4] * (place + 1), *[1] * (3 - place))
        law = law * probs
    # Of three tokens together, and of the last two: cells large enough for the test.
    return fits(counts.sum(3).flatten(), law.sum(3).flatten()) and fits(
        counts.sum((0, 1)).flatten(), law.sum((0, 1)).flatten()
    ), drafted
