"""Prompt lookup: what followed before is proposed, the longest match first."""

import time

import pytest
import torch
from one_tree import propose
from side_by_side import SHAPES
from tiny_drafters import build
from tiny_targets import MAX_POSITIONS, TinyTarget, load_target, save_target
from transformers import AutoModelForCausalLM

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.decoding.planning.acceptance import Acceptance
from moray.decoding.sampling.sampler import Sampler
from moray.drafters.configs import NgramConfig
from moray.drafters.ngram import Ngram
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape, FixedShape

GREEDY = SamplingParams()
PERIOD = 12
SINGLE = [
    ChainShape(type="chain", depth=4),
    FixedShape(type="fixed", branching=(1, 1, 1, 1)),
    DynamicShape(type="dynamic", depth=4, breadth=1, nodes=4),
]
"""One node per level, whatever the kind of tree."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("ngram"), num_hidden_layers=2, hidden_size=32)


@pytest.fixture(scope="module")
def periodic(tmp_path_factory) -> TinyTarget:
    """A target whose greedy text goes round in a circle: layers add nothing, lm_head names the token that follows."""
    folder = save_target(tmp_path_factory.mktemp("periodic"), num_hidden_layers=2, hidden_size=128)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding = torch.randn(97, 128, generator=torch.Generator().manual_seed(0))
        model.model.embed_tokens.weight.copy_(embedding / embedding.norm(dim=1, keepdim=True))
        follows = torch.arange(97) // PERIOD * PERIOD + (torch.arange(97) + 1) % PERIOD
        follows[96] = 96  # alone in its circle
        model.lm_head.weight[follows] = model.model.embed_tokens.weight.clone()
    model.save_pretrained(folder)
    return TinyTarget("periodic", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))


def made(tiny: TinyTarget, **settings) -> Ngram:
    drafter = build(tiny, NgramConfig(type="ngram", **settings))
    assert isinstance(drafter, Ngram)
    return drafter


def begun(drafter: Ngram, text: list[int]):
    state = drafter.new_state(4096, 64)
    drafter.extend(state, torch.tensor(text), {})
    return state


def followers(drafter: Ngram, text: list[int], *path: int) -> dict[int, float]:
    """After a text and a drafted path, which begins with the root: proposed tokens and their probabilities."""
    state, scores = begun(drafter, text), None
    for depth, token in enumerate(path):
        scores = drafter.step(state, torch.tensor([token]), None, depth)
    return likely(scores[0]) if scores is not None else {}


def likely(scores: torch.Tensor) -> dict[int, float]:
    probabilities = scores.softmax(-1)
    assert float(probabilities.sum()) == pytest.approx(1.0)
    return {token: p for token, p in enumerate(probabilities.tolist()) if p > 1e-9}


def best(proposed: dict[int, float]) -> int:
    return max(proposed, key=lambda token: proposed[token])


# --- What is proposed ---


def test_what_followed_before_is_proposed(tiny):
    drafter = made(tiny)
    assert followers(drafter, [5, 6, 7, 8, 5], 6) == {7: pytest.approx(1.0)}
    assert followers(drafter, [5, 6, 7, 8, 5], 6, 7) == {8: pytest.approx(1.0)}
    assert followers(drafter, [5, 6, 7, 8, 5], 8) == {5: pytest.approx(1.0)}


def test_the_longest_match_decides_over_more_frequent_shorter_ones(tiny):
    text = [1, 2, 3, *[9, 2, 4] * 5, 1]
    proposed = followers(made(tiny), text, 2)
    assert set(proposed) == {3, 4}
    assert best(proposed) == 3
    assert proposed[3] > 0.85
    assert best(followers(made(tiny, max_ngram=1), text, 2)) == 4, "one token alone was followed by 4"


def test_the_latest_follower_wins_among_equally_frequent_ones(tiny):
    drafter = made(tiny, max_ngram=1)
    assert best(followers(drafter, [2, 3, 9, 2, 4, 9], 2)) == 4
    assert best(followers(drafter, [2, 4, 9, 2, 3, 9], 2)) == 3
    assert best(followers(drafter, [2, 3, 9, 2, 3, 8, 2, 4, 9], 2)) == 3, "frequency comes before recency"


def test_a_match_that_is_not_there_falls_back_to_a_shorter_one(tiny):
    assert followers(made(tiny), [1, 2, 3, 8, 9], 2) == {3: pytest.approx(1.0)}, "9 2 was never seen, 2 was"
    assert followers(made(tiny, min_ngram=2), [1, 2, 3, 8, 9], 2) == {}
    assert followers(made(tiny, min_ngram=2), [1, 2, 3, 8, 1], 2) == {3: pytest.approx(1.0)}


def test_even_the_rarest_follower_is_likelier_than_a_token_never_seen(tiny):
    """Its share shrinks with every longer match, and with whatever else followed."""
    drafter = made(tiny, max_ngram=16)
    state = begun(drafter, [16, 22, *[16, 21] * 1500, *range(1, 17), 20, *range(1, 16)])
    scores = drafter.step(state, torch.tensor([16]), None, 0)[0]
    assert scores.topk(3).indices.tolist() == [20, 21, 22]


def test_history_mixes_verified_and_drafted_tokens(tiny):
    text = [8, 3, 5, 8, 3, 5, 2, 3, 4, 7]
    assert best(followers(made(tiny), text, 3)) == 5
    assert best(followers(made(tiny), text, 2, 3)) == 4, "the drafted 3 stands behind 2"
    assert best(followers(made(tiny), text, 1, 8, 3)) == 5


def test_every_branch_has_a_history_of_its_own(tiny):
    """0 root; 1, 2 its children; 3 below 2, 4 below 1: the same token on both."""
    drafter = made(tiny)
    state = begun(drafter, [8, 3, 5, 9, 2, 3, 4, 7])
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[1:, 0] = ancestors[3, 2] = ancestors[4, 1] = True
    drafter.step(state, torch.tensor([7]), ancestors[:1, :1], 0)
    drafter.step(state, torch.tensor([8, 2]), ancestors[1:3, :3], 1)
    scores = drafter.step(state, torch.tensor([3, 3]), ancestors[3:5], 2)
    assert scores.argmax(dim=-1).tolist() == [4, 5]


# --- What it remembers ---


def test_only_the_latest_followers_of_an_ngram_are_remembered(tiny):
    text = [token for follower in range(10, 60) for token in (5, follower)]
    proposed = followers(made(tiny), text, 5)
    assert sorted(proposed) == list(range(44, 60))
    state = begun(made(tiny), text * 20)
    assert max(map(len, state.followers.values())) == 16


def test_a_reset_state_has_forgotten_everything(tiny):
    drafter = made(tiny)
    state = begun(drafter, [5, 6, 7, 5, 6, 7])
    drafter.step(state, torch.tensor([5]), None, 0)
    drafter.reset(state)
    assert drafter.step(state, torch.tensor([5]), None, 0) is None
    drafter.extend(state, torch.tensor([6, 9]), {})
    assert drafter.step(state, torch.tensor([7]), None, 0) is None, "7 6 9 was never read"
    assert likely(drafter.step(state, torch.tensor([6]), None, 0)[0]) == {9: pytest.approx(1.0)}


def test_reading_takes_time_in_proportion_to_the_text(tiny):
    drafter = made(tiny)

    def seconds(length: int) -> float:
        text = torch.randint(97, (length,), generator=torch.Generator().manual_seed(0))
        fastest = float("inf")
        for _ in range(3):
            state = drafter.new_state(length, 4)
            begin = time.process_time()
            for piece in text.split(4):
                drafter.extend(state, piece, {})
            fastest = min(fastest, time.process_time() - begin)
        return fastest

    assert seconds(16_000) < 4 * 8 * seconds(2_000), "8 times the text; were it quadratic, 64 times the time"


# --- Decoding ---


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_where_nothing_matches_the_tree_is_the_root_alone(tiny, shape):
    drafter = made(tiny)
    state = begun(drafter, [1, 2, 3])
    select = Sampler(GREEDY, 97, torch.device("cpu")).selector(3, shape.depth, isinstance(shape, ChainShape))
    tree = propose(drafter, state, torch.tensor([50]), shape, select)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()) == ([50], [-1], [0])
    assert tree.ancestors.tolist() == [[True]]
    assert tree.max_depth == 0, "no level was drafted, so none can have been refused"


@pytest.mark.parametrize("shape", SINGLE, ids=lambda shape: shape.type)
def test_a_draft_ends_where_the_matches_end(tiny, shape):
    """Of 1 2 3 1 it is known what follows 1 2 and 2 3, but not what follows 3 1."""
    drafter = made(tiny, max_ngram=3, min_ngram=2)
    select = Sampler(GREEDY, 97, torch.device("cpu")).selector(4, shape.depth, isinstance(shape, ChainShape))
    tree = propose(drafter, begun(drafter, [1, 2, 3, 1]), torch.tensor([2]), shape, select)
    assert tree.tokens.tolist() == [2, 3, 1]
    assert tree.depths.tolist() == [0, 1, 2]
    assert tree.max_depth == 2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_cycle_without_a_match_is_a_plain_step(periodic, shape):
    """The first round of a periodic text has nothing to look up: one token a cycle, and nothing counts as drafted."""
    prompt = [3]
    generation = SpeculativeDecoder(periodic.target, made(periodic), shape, MAX_POSITIONS).generate(
        prompt, GREEDY, PERIOD, ()
    )
    assert generation.tokens == [(4 + i) % PERIOD for i in range(PERIOD)] == periodic.hugging_face(prompt, PERIOD)
    assert generation.accepted == generation.drafted == [0] * (PERIOD - 1)
    assert generation.emitted == [1] * (PERIOD - 1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_text_that_repeats_is_accepted_in_long_runs(periodic, shape):
    decoder = SpeculativeDecoder(periodic.target, made(periodic), shape, MAX_POSITIONS)
    prompt = [40]
    generation = decoder.generate(prompt, GREEDY, 80, ())
    assert generation.tokens == periodic.hugging_face(prompt, 80)
    known = PERIOD  # cycles until the first token comes round again
    assert generation.accepted[known:-1] == [shape.depth] * (generation.num_cycles - known - 1)
    assert generation.num_cycles <= known + 1 + (80 - known) // (shape.depth + 1)


def test_a_prompt_that_repeats_is_accepted_from_the_start(periodic):
    prompt = [40 + i if i < 8 else 28 + i for i in range(20)]
    assert prompt[:13] == [40, 41, 42, 43, 44, 45, 46, 47, 36, 37, 38, 39, 40]
    shape = ChainShape(type="chain", depth=7)
    decoder = SpeculativeDecoder(periodic.target, made(periodic), shape, MAX_POSITIONS)
    generation = decoder.generate(prompt, GREEDY, 33, ())
    assert generation.tokens == periodic.hugging_face(prompt, 33)
    assert generation.accepted == [7] * 4
    sampled = decoder.generate(prompt, SamplingParams(temperature=0.02, seed=1), 33, ())
    assert (sampled.tokens, sampled.accepted) == (generation.tokens, generation.accepted)


def test_an_adaptive_tree_does_not_take_silence_for_a_refusal(periodic):
    """Cycles without a match say nothing about how often drafts are accepted."""
    shape = AdaptiveShape(type="adaptive", depth=3, breadth=2, nodes=6)
    decoder = SpeculativeDecoder(periodic.target, made(periodic), shape, MAX_POSITIONS)
    decoder.generate([3], GREEDY, PERIOD, ())
    (scheduler,) = decoder._engine.draft_schedulers.values()
    untried = Acceptance(3, decoder.drafter.layer_counts).rates(0)
    assert scheduler.controller._acceptance.rates(0) == untried
