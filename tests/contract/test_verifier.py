"""The verifier's output law is the target's: chi-square on enumerable vocabularies, and proof that it would show.

A check is a function that says whether a verifier passes. Each is run on the library and, patched, on verifiers with
one known fault, which must fail the very same check.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import jaxtyping
import pytest
import torch
from scipy.stats import chisquare
from support import MAX_POSITIONS, SHAPES, Rehearsed, TinyTarget, is_lossless, load_target

from moray.decoding import accept as accept_module
from moray.decoding import speculate as speculate_module
from moray.decoding.accept import Accepted, accept, accept_typical
from moray.decoding.params import SamplingParams
from moray.decoding.sampling import STREAM_DRAFT, Sampler, counter_uniform
from moray.decoding.session import TargetSession
from moray.decoding.speculate import PlainDecoder, SpeculativeDecoder
from moray.drafters.configs import NgramConfig
from moray.targets.head import TargetHead
from moray.targets.kv_cache import KVCache
from moray.trees.grow import grow
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, FixedShape
from moray.trees.tree import PrefixMask

CPU = torch.device("cpu")
SIGNIFICANCE = 0.01  # seeds are fixed: a check that passes once passes always
ROOT_POSITION = 5
REJECTION = SamplingParams(temperature=1.0, rule="rejection")
COUPLED = SamplingParams(temperature=1.0, rule="coupled")
CHAIN = ChainShape(type="chain", depth=2)
SIBLINGS = FixedShape(type="fixed", branching=(2, 2))
DYNAMIC = DynamicShape(type="dynamic", depth=2, breadth=2, nodes=4)


@pytest.fixture(autouse=True)
def _unchecked_shapes():
    """Thousands of tiny cycles: checking the tensors' shapes, as all other tests do, would cost five times as much."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- A world that can be enumerated: the next token depends on the last one ---


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


def keeps_the_law(
    shape, params: SamplingParams, siblings: bool = False, world: TableWorld | None = None, samples: int = 1200
) -> bool:
    """Whether texts of three tokens, one per seed, have the target's law."""
    world = world or TableWorld()
    counts = torch.zeros(world.vocabulary**3, dtype=torch.float64)
    for seed in range(samples):
        a, b, c = world.generate(shape, params.model_copy(update={"seed": seed}), 3, siblings)
        counts[(a * world.vocabulary + b) * world.vocabulary + c] += 1
    return fits(counts, world.law(params, 3))


RULES = {
    "chain sampled from q": (CHAIN, REJECTION, False),
    "independent siblings": (SIBLINGS, REJECTION, True),
    "three independent siblings": (FixedShape(type="fixed", branching=(3,)), REJECTION, True),
    "deterministic tree": (SIBLINGS, REJECTION, False),
    "deterministic dynamic tree": (DYNAMIC, REJECTION, False),
    "coupled chain": (CHAIN, COUPLED, False),
    "coupled tree": (DYNAMIC, COUPLED, False),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_target_s_law(rule):
    assert keeps_the_law(*RULES[rule])


@pytest.mark.parametrize("shape", [CHAIN, SIBLINGS], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_filters_hold_under_every_rule(shape, rule):
    world = TableWorld(vocabulary=4, sharpness=0.7, seed=2)
    params = SamplingParams(temperature=0.9, top_k=3, top_p=0.9, rule=rule)
    law = world.law(params, 3)
    assert 8 <= int((law > 0).sum()) < law.numel() - 8, "the filters forbid many texts and leave many"
    assert keeps_the_law(shape, params, world=world)


@pytest.mark.parametrize("name", ["drafter is the target", "drafter is sure and wrong"])
def test_extreme_drafters_keep_the_law(name):
    world = TableWorld(seed=3)
    world.drafter = world.target if name == "drafter is the target" else (-40 * world.target)
    for rule in ("chain sampled from q", "deterministic tree", "independent siblings"):
        assert keeps_the_law(*RULES[rule], world=world, samples=600)


def test_the_check_tells_close_laws_apart():
    """The chi-square itself can fail: texts of a slightly warmer target do not pass for the target's."""
    world, warmer = TableWorld(), TableWorld()
    warmer.target = world.target / 1.3
    counts = torch.zeros(27, dtype=torch.float64)
    for seed in range(800):
        a, b, c = warmer.generate(CHAIN, COUPLED.model_copy(update={"seed": seed}), 3)
        counts[(a * 3 + b) * 3 + c] += 1
    assert fits(counts, warmer.law(COUPLED, 3))
    assert not fits(counts, world.law(COUPLED, 3))


# --- The rejection rule exactly: every decision enumerated instead of sampled ---


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


# --- Real generations ---


@pytest.fixture(scope="session")
def four_tokens(tmp_path_factory) -> TinyTarget:
    """A real target with a vocabulary of four."""
    return load_target(
        tmp_path_factory.mktemp("four"),
        vocab_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.4,
        seed=11,
    )


PROMPT = [1, 3, 0]


@cache
def law_of_answers(tiny_id: int, params: SamplingParams, model) -> torch.Tensor:
    """Exact law of the first two tokens, from the model's own forward pass over every text."""
    texts = torch.tensor([[*PROMPT, token] for token in range(4)])
    with torch.no_grad():
        logits = model(texts).logits
    first = reference_probs(logits[:1, -2], params)[0]
    return (first[:, None] * reference_probs(logits[:, -1], params)).flatten()


def answers_keep_the_law(tiny: TinyTarget, shape, params: SamplingParams, samples: int = 450) -> bool:
    """Whether answers of two tokens by one decoder have the target's law."""
    decoder = SpeculativeDecoder(tiny.target, Rehearsed(tiny.target, 1.0), shape, 16)
    counts = torch.zeros(16, dtype=torch.float64)
    for seed in range(samples):
        first, second = decoder.generate(PROMPT, params.model_copy(update={"seed": seed}), 2, ()).tokens
        counts[first * 4 + second] += 1
    return fits(counts, law_of_answers(id(tiny), params, tiny.target.model))


@pytest.mark.parametrize("params", [REJECTION, COUPLED], ids=["rejection", "coupled"])
@pytest.mark.parametrize("shape", [ChainShape(type="chain", depth=1), SIBLINGS], ids=["chain", "tree"])
def test_real_answers_have_the_target_s_law(four_tokens, shape, params):
    assert answers_keep_the_law(four_tokens, shape, params)


# --- Real generations whose drafts have another depth in every cycle ---

ADAPTIVE_CHAIN = AdaptiveShape(type="adaptive", depth=3)
ADAPTIVE_TREE = AdaptiveShape(type="adaptive", depth=2, breadth=2, nodes=5)
ECHOES = [1, 3, 0, 2, 1, 3, 2, 0, 1, 3]
"""A prompt in which prompt lookup finds some continuations and not others."""


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


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize(
    ("shape", "params"),
    [(ADAPTIVE_CHAIN, REJECTION), (ADAPTIVE_TREE, REJECTION)],
    ids=["chain", "tree"],
)
def test_adaptive_drafts_keep_the_target_s_law(four_tokens, shape, params):
    keeps, drafted = longer_answers(four_tokens, Rehearsed(four_tokens.target, 1.0), shape, params, PROMPT)
    assert keeps
    assert drafted == set(range(shape.depth + 1)), "no draft, and every depth"


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("fault", ["accepts always", "residual from p"])
def test_a_biased_verifier_fails_on_adaptive_drafts(four_tokens, fault, monkeypatch):
    monkeypatch.setattr(accept_module, *FAULTS[fault])
    assert not longer_answers(four_tokens, Rehearsed(four_tokens.target, 1.0), ADAPTIVE_CHAIN, REJECTION, PROMPT)[0]


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC, ADAPTIVE_CHAIN], ids=lambda shape: shape.name)
def test_drafts_that_stop_early_keep_the_target_s_law(four_tokens, shape):
    """Prompt lookup: where a sampled chain ends depends on the tokens drawn for it."""
    drafter = NgramConfig(type="ngram", min_ngram=2, max_ngram=3).build(TargetHead.of(four_tokens.target)).eval()
    keeps, drafted = longer_answers(four_tokens, drafter, shape, REJECTION, ECHOES)
    assert keeps
    assert 0 in drafted
    assert len(drafted) >= 2, "no draft was cut short"


# --- Typical acceptance: another law, by intent, and exactly the one it says ---

TYPICAL = SamplingParams(temperature=1.0, rule="typical")
NOTHING = SamplingParams(temperature=1.0, rule="typical", typical_epsilon=1.0, typical_delta=1e9)


def typical_law(world: TableWorld, params: SamplingParams, depth: int, count: int) -> torch.Tensor:
    """Exact law of `count` tokens by chains of `depth`: the accepted drafts are certain, what follows is drawn."""
    probs = reference_probs(world.target, params)
    best = world.drafter.argmax(dim=-1).tolist()
    law = torch.zeros(world.vocabulary**count, dtype=torch.float64)

    def spread(text: list[int], mass: float) -> None:
        last = text[-1] if text else 0
        text = list(text)
        for _ in range(depth):
            p = probs[last]
            bound = min(params.typical_epsilon, params.typical_delta * math.exp(-float(torch.special.entr(p).sum())))
            if not p[best[last]] > bound:
                break
            last = best[last]
            text.append(last)
        for token in range(world.vocabulary):
            longer = [*text, token]
            if len(longer) < count:
                spread(longer, mass * float(probs[last, token]))
            else:
                index = 0
                for digit in longer[:count]:
                    index = index * world.vocabulary + digit
                law[index] += mass * float(probs[last, token])

    spread([], 1.0)
    return law


def counts_of(world: TableWorld, shape, params: SamplingParams, samples: int = 800) -> torch.Tensor:
    """How often each text of three tokens came, one per seed."""
    counts = torch.zeros(world.vocabulary**3, dtype=torch.float64)
    for seed in range(samples):
        a, b, c = world.generate(shape, params.model_copy(update={"seed": seed}), 3)
        counts[(a * world.vocabulary + b) * world.vocabulary + c] += 1
    return counts


@pytest.mark.parametrize("shape", [CHAIN, SIBLINGS, DYNAMIC], ids=["chain", "fixed", "dynamic"])
def test_typical_acceptance_does_not_keep_the_law(shape):
    assert not keeps_the_law(shape, TYPICAL, samples=600)


@pytest.mark.parametrize("shape", [CHAIN, SIBLINGS, DYNAMIC], ids=["chain", "fixed", "dynamic"])
def test_typical_acceptance_that_accepts_nothing_is_plain_sampling(shape):
    """Text by text that of coupled sampling, and so the target's law."""
    world = TableWorld()
    for seed in range(40):
        update = {"seed": seed}
        plain = world.generate(shape, COUPLED.model_copy(update=update), 6)
        assert world.generate(shape, NOTHING.model_copy(update=update), 6) == plain
    assert keeps_the_law(shape, NOTHING, samples=600)


@pytest.mark.parametrize("update", [{}, {"typical_epsilon": 0.5, "typical_delta": 1.0}, {"top_k": 2}], ids=str)
def test_typical_chains_have_the_law_of_their_definition(update):
    world, params = TableWorld(vocabulary=4, seed=4), TYPICAL.model_copy(update=update)
    law = typical_law(world, params, CHAIN.depth, 3)
    torch.testing.assert_close(float(law.sum()), 1.0)
    assert fits(counts_of(world, CHAIN, params), law)
    sampled = params.model_copy(update={"rule": "coupled"})
    assert not fits(counts_of(world, CHAIN, sampled), law), "sampling has another law"


def follows_the_root(tree, log_p, sampler, root_position) -> Accepted:
    """Draws the next token from the root's distribution instead of the last accepted node's."""
    result = accept_typical(tree, log_p, sampler, root_position)
    next_token = int(sampler.choose(log_p[:1], root_position + len(result.path) + 1))
    return Accepted(result.path, result.tokens, next_token)


def asks_for_nothing(tree, log_p, sampler, root_position) -> Accepted:
    """Accepts whatever is possible."""
    params = sampler.params.model_copy(update={"typical_epsilon": 0.0})
    return accept_typical(tree, log_p, Sampler(params, log_p.shape[1], CPU), root_position)


@pytest.mark.parametrize("fault", [follows_the_root, asks_for_nothing])
def test_a_biased_typical_rule_fails_the_check(fault, monkeypatch):
    world = TableWorld(vocabulary=4, seed=4)
    monkeypatch.setattr(accept_module, "accept_typical", fault)
    assert not fits(counts_of(world, CHAIN, TYPICAL), typical_law(world, TYPICAL, CHAIN.depth, 3))


# --- Faults, each of which must fail a check above ---


def always_accept(tree, probs, sampler, root_position) -> Accepted:
    """Takes the first child down to the last level."""
    path, node = [], 0
    while (child := next((n for n in range(1, tree.num_nodes) if int(tree.parents[n]) == node), None)) is not None:
        path.append(child)
        node = child
    last = int(sampler.choose(probs[node][None].log(), root_position + len(path) + 1))
    return Accepted(path, tree.tokens[path].tolist(), last)


def with_residual(residual: Callable) -> Callable:
    """The rejection rule along first children, with another distribution after a refusal."""

    def rule(tree, probs, sampler, root_position) -> Accepted:
        path, node = [], 0
        while True:
            children = [n for n in range(1, tree.num_nodes) if int(tree.parents[n]) == node]
            p = probs[node].double()
            position = root_position + len(path) + 1
            if children:
                child, token = children[0], int(tree.tokens[children[0]])
                q = tree.draft_probs[child].double()
                test = sampler.uniform(accept_module.STREAM_TEST, position, 1)[0]
                if bool(test * q[token] < p[token]):
                    path.append(child)
                    node = child
                    continue
                p = residual(p, q)
            noise = accept_module.gumbel(sampler.uniform(accept_module.STREAM_RESIDUAL, position, p.shape[0]))
            return Accepted(path, tree.tokens[path].tolist(), int((p.log() + noise).argmax()))

    return rule


def test_the_rule_that_the_faults_are_made_of_is_right(monkeypatch):
    """With the right residual it passes: so what fails below is the fault and not the frame around it."""
    monkeypatch.setattr(accept_module, "accept_by_rejection", with_residual(lambda p, q: (p - q).clamp(min=0)))
    assert keeps_the_law(CHAIN, REJECTION)


FAULTS = {
    "accepts always": ("accept_by_rejection", always_accept),
    "residual from p": ("accept_by_rejection", with_residual(lambda p, q: p)),
    "residual from |p - q|": ("accept_by_rejection", with_residual(lambda p, q: (p - q).abs())),
    "draft and test share a stream": ("STREAM_TEST", STREAM_DRAFT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_biased_verifier_fails_the_check(fault, monkeypatch):
    monkeypatch.setattr(accept_module, *FAULTS[fault])
    assert not keeps_the_law(CHAIN, REJECTION)


@pytest.mark.parametrize("fault", ["accepts always", "residual from p"])
def test_a_biased_verifier_fails_on_real_answers(four_tokens, fault, monkeypatch):
    monkeypatch.setattr(accept_module, *FAULTS[fault])
    assert not answers_keep_the_law(four_tokens, ChainShape(type="chain", depth=1), REJECTION)


def test_siblings_without_renormalising_fail_the_check(monkeypatch):
    """The second sibling tested against the target's p, as if the first had not been refused."""

    def forgetful(tree, probs, sampler, root_position):
        tests = sampler.uniform(accept_module.STREAM_TEST, root_position + 1, 2)
        p = probs[0].double()
        for test, child in zip(tests, (1, 2), strict=True):
            token = int(tree.tokens[child])
            if bool(test < p[token]):
                return Accepted([child], [token], int(sampler.choose(probs[child][None].log(), root_position + 2)))
        p[tree.tokens[1:3]] = 0.0
        noise = accept_module.gumbel(sampler.uniform(accept_module.STREAM_RESIDUAL, root_position + 1, p.shape[0]))
        return Accepted([], [], int((p.log() + noise).argmax()))

    monkeypatch.setattr(accept_module, "accept_by_rejection", forgetful)
    assert not keeps_the_law(FixedShape(type="fixed", branching=(2,)), REJECTION)


def test_a_q_that_was_not_sampled_from_fails_the_check(monkeypatch):
    """Drafts come from the filtered q, the test is handed the unfiltered one."""
    original = Sampler.selector

    def selector(self, root_position, depth, is_chain):
        select = original(self, root_position, depth, is_chain)

        def unfiltered(logits, level, children):
            tokens, scores, _ = select(logits, level, children)
            return tokens, scores, logits.softmax(dim=-1)

        return unfiltered

    world, params = TableWorld(vocabulary=4, seed=2), SamplingParams(temperature=0.7, top_k=3, rule="rejection")
    assert keeps_the_law(CHAIN, params, world=world)
    monkeypatch.setattr(Sampler, "selector", selector)
    assert not keeps_the_law(CHAIN, params, world=world)


def test_ignored_filters_fail_the_check(monkeypatch):
    original = Sampler.log_probs

    def unfiltered(self, logits):
        return original(Sampler(self.params.model_copy(update={"top_k": 0, "top_p": 1.0}), 4, CPU), logits)

    world, params = TableWorld(vocabulary=4, seed=2), SamplingParams(temperature=0.7, top_p=0.7)
    monkeypatch.setattr(Sampler, "log_probs", unfiltered)
    assert not keeps_the_law(CHAIN, params, world=world, samples=300)


def test_coupled_noise_that_ignores_the_position_fails_the_check(monkeypatch):
    """One noise for all positions gives every token its own law, but their joint law is wrong."""

    def stuck(self, first_position, count):
        return accept_module.gumbel(
            counter_uniform(self.params.seed, 0, torch.zeros(count, dtype=torch.long), self._vocab_size)
        )

    monkeypatch.setattr(Sampler, "noise", stuck)
    assert not keeps_the_law(CHAIN, COUPLED)


# --- Faults of the greedy path and of the cache ---


def takes_the_second_best(tree, logits, sampler, root_position) -> Accepted:
    """Also accepts a first child that is only the target's second choice."""
    first = int(tree.tokens[1])
    if first in logits[0].topk(2).indices.tolist():
        return Accepted([1], [first], int(logits[1].argmax()))
    return accept(tree, logits, sampler, root_position)


def keep_first_slots(self, path) -> None:
    """Keeps the first slots behind the committed ones instead of the path's."""
    self.commit(path.shape[0])


_commit = TargetSession.commit


def keep_a_refused_slot(self, path):
    """Forgets to drop the first refused node."""
    taps = _commit(self, path)
    if self.cache.length + 32 < self.capacity:
        self.cache.length += 1
        self._mask.commit(1)
    return taps


def drop_the_last_slot(self, path):
    """Counts the accepted path one short."""
    taps = _commit(self, path)
    if path:
        self.cache.length -= 1
        self._mask.length -= 1
        self._mask._data[:, self._mask.length :] = -torch.inf
    return taps


def is_greedy_lossless(tiny: TinyTarget, shape_name: str) -> bool:
    drafter = Rehearsed(tiny.target, 0.5)
    prompts = [tiny.prompt(), tiny.prompt(1, 20)]
    return is_lossless(tiny, drafter, SHAPES[shape_name], SamplingParams(), prompts, 25)


CACHE_FAULTS = {
    "second best accepted": (speculate_module, "accept", takes_the_second_best, SHAPES),
    "wrong slots kept": (KVCache, "commit_path", keep_first_slots, ("fixed", "dynamic")),
    "refused slot kept": (TargetSession, "commit", keep_a_refused_slot, SHAPES),
    "accepted slot dropped": (TargetSession, "commit", drop_the_last_slot, SHAPES),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_faulty_greedy_path_fails_the_check(tiny, fault, monkeypatch):
    owner, name, replacement, shape_names = CACHE_FAULTS[fault]
    for shape_name in shape_names:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            assert not is_greedy_lossless(tiny("llama"), shape_name), shape_name
        assert is_greedy_lossless(tiny("llama"), shape_name), "right again without the fault"


def test_a_stale_mask_fails_the_check(tiny, monkeypatch):
    """A mask that keeps what earlier trees showed lets refused branches be seen."""

    def view(self, block):
        new, scratch = block.shape
        end = self.length + scratch
        seen = self._data[:new, self.length : end]
        self._data[:new, self.length : end] = torch.where(block, torch.zeros_like(seen), seen)
        return self._data[None, None, :new, :end]

    with monkeypatch.context() as patch:
        patch.setattr(PrefixMask, "view", view)
        assert not is_greedy_lossless(tiny("llama"), "dynamic")


def test_plain_decoding_is_the_yardstick(four_tokens):
    """The baseline itself draws from the exact law, so that equality with it means something."""
    decoder = PlainDecoder(four_tokens.target, MAX_POSITIONS)
    counts = torch.zeros(16, dtype=torch.float64)
    for seed in range(600):
        first, second = decoder.generate(PROMPT, COUPLED.model_copy(update={"seed": seed}), 2, ()).tokens
        counts[first * 4 + second] += 1
    assert fits(counts, law_of_answers(id(four_tokens), COUPLED, four_tokens.target.model))
