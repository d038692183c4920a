"""Whatever a drafter says, in process or over the wire, costs speed and never a token: every fault with every tree."""

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from laws import REJECTION, SHORT_CHAIN, TableWorld, fits
from one_place import OnePlace
from one_tree import grow
from rehearsed import Rehearsed
from shape_checks import unchecked
from side_by_side import ADAPTIVE, COUPLED, FILTERED, GREEDY, SHAPES, plainly
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target

from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.remote.channel import Channel
from moray.decoding.remote.host import DraftHost
from moray.decoding.remote.messages import DraftedTree, DraftReply, DraftRequest, Entry, pack, restored, unpack_request
from moray.decoding.remote.source import RemoteDrafts
from moray.decoding.request import Request
from moray.decoding.sampling.accept import accept
from moray.decoding.sampling.sampler import Sampler
from moray.errors import ConfigError, DataError
from moray.trees.ranking import prune
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, SparseShape

DRAFTER = "drafter"
CAPACITY, COUNT = 128, 12
INF, NAN = float("inf"), float("nan")
SPARSE = SparseShape(type="sparse", paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
TREES = SHAPES | ADAPTIVE | {"sparse": SPARSE}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


# --- Scores, in process ---


def _some(value: float) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """`value` in place of every fifth score, from another one on at each level."""

    def fault(scores: torch.Tensor, depth: int) -> torch.Tensor:
        scores = scores.clone()
        scores[:, depth::5] = value
        return scores

    return fault


SCORES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "all NaN": lambda scores, depth: scores * NAN,
    "some NaN": _some(NAN),
    "some inf": _some(INF),
    "some -inf": _some(-INF),
    "all -inf": lambda scores, depth: torch.full_like(scores, -INF),
    "NaN in one node": lambda scores, depth: torch.cat([scores[:1] * NAN, scores[1:]]),
    "NaN below the first level": lambda scores, depth: scores * NAN if depth else scores,
    "all the same": lambda scores, depth: torch.zeros_like(scores),
    "ids beyond the vocabulary": lambda scores, depth: torch.cat([scores, scores + 99], dim=1),
    "too few tokens": lambda scores, depth: scores[:, :2],
    "too many nodes": lambda scores, depth: torch.cat([scores, scores]),
    "no nodes": lambda scores, depth: scores[:0],
}


class Faulty(Rehearsed):
    """The target as its own drafter, whose scores are spoilt."""

    def __init__(self, target, fault) -> None:
        super().__init__(target, 0.3)
        self._fault = fault

    def step(self, state, tokens, ancestors, depth):
        return self._fault(super().step(state, tokens, ancestors, depth), depth)


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("fault", SCORES)
def test_spoilt_scores_never_change_the_text(tiny, fault, tree):
    drafter, prompt = Faulty(tiny.target, SCORES[fault]), tiny.prompt()
    decoder = SpeculativeDecoder(tiny.target, drafter, TREES[tree], CAPACITY)
    params = (GREEDY, FILTERED)[(list(TREES).index(tree) + list(SCORES).index(fault)) % 2]
    assert decoder.generate(prompt, params, COUNT, ()).tokens == plainly(tiny, prompt, params, COUNT)


@pytest.mark.parametrize("tree", TREES)
def test_spoilt_scores_never_change_the_text_of_an_engine(tiny, tree):
    drafts = {
        fault: LocalDrafts(Faulty(tiny.target, spoil), CAPACITY, TREES[tree].num_expanded)
        for fault, spoil in SCORES.items()
    }
    config = EngineConfig(kv_cache_tokens=len(SCORES) * 256, max_model_len=CAPACITY, max_num_seqs=8, tree=TREES[tree])
    engine = Engine(tiny.target, config, (), drafts=drafts)
    asked = [(fault, (GREEDY, COUPLED)[number % 2], tiny.prompt(number % 3)) for number, fault in enumerate(SCORES)]
    requests = [
        Request(prompt=tuple(prompt), params=params, max_new_tokens=COUNT, drafter=fault)
        for fault, params, prompt in asked
    ]
    made = answer_batch(engine, requests)
    for (fault, params, prompt), generation in zip(asked, made, strict=True):
        assert generation.tokens == plainly(tiny, prompt, params, COUNT), fault


def test_one_nan_in_a_trained_weight_leaves_the_text_alone(tiny):
    """As it was found: a whole EAGLE, with trees that rank nodes by their scores."""
    drafter, prompt = build(tiny, VARIANTS["eagle-0"]), tiny.prompt()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = NAN
    for shape in (SHAPES["dynamic"], ADAPTIVE["adaptive tree"]):
        generation = SpeculativeDecoder(tiny.target, drafter, shape, CAPACITY).generate(prompt, GREEDY, COUNT, ())
        assert generation.tokens == plainly(tiny, prompt, GREEDY, COUNT)
        assert set(generation.accepted) == {0}


def test_scores_of_another_shape_are_said_once(tiny, caplog):
    drafter = Faulty(tiny.target, SCORES["ids beyond the vocabulary"])
    with caplog.at_level(logging.WARNING):
        SpeculativeDecoder(tiny.target, drafter, SHAPES["chain"], CAPACITY).generate(tiny.prompt(), GREEDY, COUNT, ())
    (line,) = caplog.messages
    assert f"shape [1, 1, {2 * tiny.target.spec.vocab_size}]" in line


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_tree_ranked_by_no_numbers_still_begins_with_its_root(value):
    """What went wrong: NaN ranks before the root's 0, so the root was not among the best."""

    def select(logits, depth, children):
        tokens = torch.arange(children).expand(len(logits), -1)
        return tokens, torch.full((len(logits), children), value), None

    shape = DynamicShape(type="dynamic", depth=3, breadth=3, nodes=6)
    tree = grow(torch.tensor([7]), shape, lambda tokens, ancestors, depth: torch.zeros(len(tokens), 9), select)
    assert int(tree.tokens[0]) == 7
    parents = tree.parents.tolist()
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    ((pruned, promised),) = prune([tree], lambda _: 6)
    assert pruned.tokens.tolist() == [7], "where trees are pruned, what has no probability is not proposed at all"
    assert promised == 0.0


class Misdrawn(TableWorld):
    """A drafter whose distribution is not the one that its token was drawn from, and is none."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._spoil = spoil

    def generate(self, shape, params: SamplingParams, count: int, siblings: bool = False) -> list[int]:
        sampler, tokens = Sampler(params, self.vocabulary, CPU), [0]
        while len(tokens) <= count:
            position = 4 + len(tokens)
            select = sampler.selector(position, shape.depth, True)
            tree = grow(torch.tensor(tokens[-1:]), shape, lambda new, *_: self.drafter[new], select)
            tree = replace(tree, draft_probs=self._spoil(tree.draft_probs))
            result = accept(tree, self.target[tree.tokens], sampler, position)
            tokens += [*result.tokens, result.next_token]
        return tokens[1 : count + 1]


@pytest.mark.parametrize(
    "spoil",
    [lambda q: q * NAN, lambda q: q * 3, lambda q: q - 0.5, lambda q: q * 0],
    ids=["NaN", "sums to 3", "negative", "zero"],
)
def test_rejection_keeps_the_law_whatever_the_drafter_says_that_it_drew_from(spoil):
    world, samples = Misdrawn(spoil), 500
    counts = torch.zeros(world.vocabulary**2, dtype=torch.float64)
    for seed in range(samples):
        a, b = world.generate(SHORT_CHAIN, REJECTION.model_copy(update={"seed": seed}), 2)
        counts[a * world.vocabulary + b] += 1
    assert fits(counts, world.law(REJECTION, 2))


# --- Over the wire ---


def _changed(**fields) -> Callable[[DraftedTree], DraftedTree]:
    return lambda tree: tree.model_copy(update=fields)


def _tokens(change: Callable[[list[int]], list[int]]) -> Callable[[DraftedTree], DraftedTree]:
    return lambda tree: tree.model_copy(update={"tokens": tuple(change(list(tree.tokens)))})


def _parents(change: Callable[[list[int]], list[int]]) -> Callable[[DraftedTree], DraftedTree]:
    return lambda tree: tree.model_copy(update={"parents": tuple(change(list(tree.parents))), "is_chain": False})


HARMLESS: dict[str, Callable[[DraftedTree], DraftedTree]] = {
    "as it is": lambda tree: tree,
    "twice the same token": _tokens(lambda tokens: [tokens[0]] * len(tokens)),
    "one node less": lambda tree: tree.model_copy(update={"tokens": tree.tokens[:-1], "parents": tree.parents[:-1]}),
    "no draft": _changed(tokens=(), parents=()),
}
REFUSED: dict[str, Callable[[DraftedTree], DraftedTree]] = {
    "another root": _tokens(lambda tokens: [(tokens[0] + 1) % 90, *tokens[1:]]),
    "negative token": _tokens(lambda tokens: [*tokens[:-1], -1]),
    "token beyond the vocabulary": _tokens(lambda tokens: [*tokens[:-1], 10**6]),
    "token beyond int64": _tokens(lambda tokens: [*tokens[:-1], 1 << 80]),
    "too many nodes": lambda tree: tree.model_copy(
        update={"tokens": tree.tokens + tree.tokens[1:] * 9, "parents": tree.parents and tree.parents + (0,) * 900}
    ),
    "no parents": _changed(parents=(), is_chain=False),
    "a parent behind its child": _parents(lambda parents: [-1, *range(2, len(parents)), 1] if parents else [-1, 1]),
    "a node without parent": _parents(lambda parents: [-1] * max(2, len(parents))),
    "scores above certainty": lambda tree: tree.model_copy(update={"scores": (1000.0,) * len(tree.tokens)}),
    "too few scores": _changed(scores=(0.0,)),
    "levels that the tree has not": _changed(num_empty_levels=60),
    "fewer levels than none": _changed(num_empty_levels=-1),
}


class FaultyChannel(Channel):
    """A drafter process in this one, of whose drafts some come spoilt."""

    def __init__(self, host: DraftHost, spoil: Callable[[DraftReply], bytes]) -> None:
        self._host, self._spoil = host, spoil
        self._replies: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self._replies.append(self._spoil(self._host.handle(*unpack_request(frame))))

    def receive(self, seconds: float) -> bytes | None:
        return self._replies.pop(0) if self._replies else None

    def close(self) -> None:
        self._replies.clear()


def answers_over(tiny, shape, spoil: Callable[[DraftReply], bytes]) -> RemoteDrafts:
    """Two answers, drafted through a channel, are the target's own; returns the source."""
    drafter = Rehearsed(tiny.target, 0.3)
    host = DraftHost({DRAFTER: drafter}, CAPACITY, 64)
    source = RemoteDrafts(drafter, DRAFTER, OnePlace(), timeout=0.2, connect=lambda _: FaultyChannel(host, spoil))
    config = EngineConfig(kv_cache_tokens=3 * 256, max_model_len=CAPACITY, tree=shape)
    engine = Engine(tiny.target, config, (), drafts={DRAFTER: source})
    asked = [(GREEDY, tiny.prompt()), (COUPLED, tiny.prompt(1))]
    made = answer_batch(
        engine, [Request(prompt=tuple(prompt), params=params, max_new_tokens=COUNT) for params, prompt in asked]
    )
    assert [g.tokens for g in made] == [plainly(tiny, prompt, params, COUNT) for params, prompt in asked]
    return source


def _spoilt(change: Callable[[DraftedTree], DraftedTree]) -> Callable[[DraftReply], bytes]:
    def spoil(reply: DraftReply) -> bytes:
        trees = [change(tree) if place == 0 and tree.tokens else tree for place, tree in enumerate(reply.trees)]
        return pack(reply.model_copy(update={"trees": tuple(trees)}))

    return spoil


@pytest.mark.parametrize("tree", [*SHAPES, "sparse"])
def test_spoilt_trees_over_the_wire_never_change_the_text(tiny, tree):
    for name, change in HARMLESS.items():
        assert answers_over(tiny, TREES[tree], _spoilt(change)).stats.num_lost == 0, name
    for name, change in REFUSED.items():
        assert answers_over(tiny, TREES[tree], _spoilt(change)).stats.num_lost > 0, name


def test_replies_to_something_else_cost_the_connection(tiny, caplog):
    def changed(**fields):
        return lambda reply: pack(reply.model_copy(update=fields))

    def stranger(reply: DraftReply) -> bytes:
        return pack(reply.model_copy(update={"trees": (*reply.trees, DraftedTree(session="x", known=0))}))

    spoilt = {
        "another number": changed(number=10**6),
        "nobody": changed(trees=()),
        "a stranger": stranger,
        "seconds": lambda reply: pack(reply).replace(b'"seconds":', b'"seconds":NaN,"x":'),
        "endless seconds": changed(seconds=INF),
        "bytes": lambda reply: b"\xff" * 40,
    }
    for name, spoil in spoilt.items():
        assert answers_over(tiny, SHAPES["chain"], spoil).stats.num_lost > 0, name
    assert any(
        "a drafter process sent a wrong reply and is given up: request 1000000 was answered, which is not open" in m
        for m in caplog.messages
    )


def test_a_chain_that_calls_itself_a_tree_may_not_be_deeper_than_what_was_asked_for():
    """Its nodes would stand beyond the table of rotations, or of positions."""
    shape = DynamicShape(type="dynamic", depth=3, breadth=4, nodes=20)
    deep = DraftedTree(session="a", known=0, tokens=(1,) * 6, is_chain=True)
    with pytest.raises(DataError, match="a draft of 5 levels and 0 empty ones came for a tree 'dynamic-3x4-20'"):
        restored(deep, CPU, 1, shape, 90)
    assert restored(deep.model_copy(update={"tokens": (1,) * 4}), CPU, 1, shape, 90).max_depth == 3


def test_requests_that_a_drafter_cannot_take_in_are_refused_whole(tiny):
    host = DraftHost({"d": build(tiny, VARIANTS["medusa-0"])}, CAPACITY, 64)
    size = tiny.target.spec.hidden_size
    good = Entry(session="a", drafter="d", known=0, tokens=(1, 2), num_kept=0, root=3)
    deep = ChainShape(type="chain", depth=8)
    cases: list[tuple[dict, tuple, tuple[int, ...], str]] = [
        ({"tokens": (1, 97)}, (SHAPES["chain"],), (2, size), "tokens from 1 to 97"),
        ({"root": -1}, (SHAPES["chain"],), (2, size), "tokens from -1 to 2"),
        ({"shape": 1}, (SHAPES["chain"],), (2, size), "names shape 1"),
        ({"num_kept": 3}, (SHAPES["chain"],), (2, size), "keeps 3 of 2 tokens"),
        ({}, (SHAPES["chain"],), (3, size), "memory 'feature' has the shape"),
        ({}, (deep,), (2, size), "tree 'chain-8' is 8 levels deep; drafter 'd' drafts at most 6"),
    ]
    for changes, shapes, rows, message in cases:
        request = DraftRequest(number=1, entries=(good.model_copy(update=changes),), shapes=shapes, params=(GREEDY,))
        with pytest.raises((DataError, ConfigError), match=message.replace("'", ".")):
            host.handle(request, {"feature": torch.zeros(rows)})
        assert host.num_sessions == 0
    other = good.model_copy(update={"session": "b"})
    for last, message in [
        (other.model_copy(update={"drafter": "x"}), "drafter 'x' is not here; there are d"),
        (other.model_copy(update={"known": CAPACITY - 1}), f"{CAPACITY + 1} tokens; {CAPACITY} are accepted"),
        (good.model_copy(update={"known": 2}), "goes on with a sequence after asking for a draft of it"),
    ]:
        request = DraftRequest(number=2, entries=(good, last), shapes=(SHAPES["chain"],), params=(GREEDY,))
        with pytest.raises(DataError, match=message):
            host.handle(request, {"feature": torch.zeros(4, size)})
        assert host.num_sessions == 0, "the first entry was applied"


# --- Trees that are too deep ---


def test_a_tree_deeper_than_a_drafter_is_refused_when_the_engine_is_built(tiny):
    """It was found in a step, which ended the replica."""
    drafter = build(tiny, VARIANTS["medusa-0"])
    deep = ChainShape(type="chain", depth=8)
    message = "tree 'chain-8' is 8 levels deep; drafter 'm' drafts at most 6: give a tree of at most 6 levels, or type"
    for source in (LocalDrafts(drafter, CAPACITY, 64), RemoteDrafts(drafter, "m", OnePlace())):
        with pytest.raises(ConfigError, match=message):
            Engine(tiny.target, EngineConfig(kv_cache_tokens=512, tree=deep), (), drafts={"m": source})
    adaptive = EngineConfig(kv_cache_tokens=512, tree=AdaptiveShape(type="adaptive", depth=8))
    engine = Engine(tiny.target, adaptive, (), drafts={"m": LocalDrafts(drafter, CAPACITY, 64)})
    assert engine.draft_schedulers["m"].shape.depth == 6
    assert engine.draft_schedulers["m"].notices == [
        "drafter 'm' drafts at most 6 levels, so tree 'adaptive-8' grows no deeper with it"
    ]
