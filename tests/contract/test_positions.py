"""Sliding windows and rotary types: text, taps and drafts are what the unmodified model gives, far beyond a window."""

import random

import pytest
import torch
from drafting import is_one_model, pieces_of, state_at, view_of
from rehearsed import Rehearsed
from side_by_side import GREEDY, SHAPES, plainly, speculate
from tiny_batches import batch_of
from tiny_drafters import VARIANTS, build
from tiny_targets import TinyTarget, load_target
from transformers import AutoModelForCausalLM, DynamicCache

from moray.activations.capture.record import record_taps
from moray.activations.format.schema import CacheConfig
from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.runner import TargetRunner
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.plain import CHUNK, PlainDecoder
from moray.decoding.request import Request
from moray.targets.head import TargetHead
from moray.trees.tree import TokenTree, structure_of

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

WINDOWS = {
    "mistral": {"sliding_window": 3},  # shorter than a tree is deep
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
}
ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}
CONTEXT = 64
"""Of the targets with these."""
LENGTHS = (30, 3, CHUNK + 5)
NEW_TOKENS = 14


@pytest.fixture(scope="module", params=WINDOWS)
def sliding(request, tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("sliding"), request.param, **WINDOWS[request.param])


@pytest.fixture(scope="module")
def stock(sliding):
    """The same weights in an unmodified model."""
    return AutoModelForCausalLM.from_pretrained(sliding.folder, attn_implementation="eager").eval()


def half_right(tiny: TinyTarget) -> Rehearsed:
    return Rehearsed(tiny.target, 0.5)


def together(tiny: TinyTarget, requests: list[Request], capacity: int, shape) -> list[list[int]]:
    """The engine's answers, in rows side by side, prompts in pieces."""
    config = EngineConfig(
        max_num_seqs=3, kv_cache_tokens=3 * 384, max_model_len=capacity, max_num_batched_tokens=48, tree=shape
    )
    drafts = {"rehearsed": LocalDrafts(half_right(tiny), capacity, shape.num_expanded)}
    engine = Engine(tiny.target, config, (), drafts=drafts)
    return [generation.tokens for generation in answer_batch(engine, requests)]


# --- Sliding windows ---


def test_the_context_is_whole_and_windows_are_per_layer(sliding):
    spec = sliding.target.spec
    expected = {"mistral": (3, (0, 1, 2, 3)), "qwen2": (12, (1, 3)), "qwen3": (12, (1, 2, 3))}
    assert (spec.sliding_window, spec.sliding_layers) == expected[sliding.name]
    assert spec.max_positions == 512


def test_text_beyond_the_window_is_what_transformers_generates(sliding):
    for seed, length in enumerate(LENGTHS):
        prompt = sliding.prompt(seed, length)
        expected = sliding.hugging_face(prompt, NEW_TOKENS)
        assert plainly(sliding, prompt, GREEDY, NEW_TOKENS) == expected
        for shape in SHAPES.values():
            assert speculate(sliding, half_right(sliding), shape, prompt, GREEDY, NEW_TOKENS).tokens == expected


def test_every_branch_of_a_tree_is_scored_as_if_it_were_alone(sliding, stock):
    """In a row alone, and in rows of different lengths; the second branch's slots are far from its positions.

    nodes   0 root   1 3 5 7 one branch   2 4 6 8 the other
    """
    parents, depths = [-1, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 1, 2, 2, 3, 3, 4, 4]
    structure = structure_of(parents, depths, torch.device("cpu"))
    tokens = torch.tensor(sliding.prompt(9, len(parents)))
    tree = TokenTree(tokens, structure.parents, structure.depths, structure.ancestors, 4)
    prompts = [sliding.prompt(seed, length) for seed, length in ((0, 30), (1, 4))]
    rows = TargetRunner(sliding.target, 128)
    rows.cache.arrange(64, 0, 0)
    with torch.inference_mode():
        rows.read(0, prompts, [0, 0])
        scored = [*sliding.target.logits(rows.verify(0, [30, 4], [tree, tree]).last)]
        for prompt in prompts:
            rows.read(1, [prompt], [0])
            scored.append(sliding.target.logits(rows.verify(1, [len(prompt)], [tree]).last[0]))
        for prompt, logits in zip([*prompts, *prompts], scored, strict=True):
            for path in ([0, 1, 3, 5, 7], [0, 2, 4, 6, 8]):
                alone = stock(torch.tensor([prompt + tokens[path].tolist()])).logits[0, len(prompt) :]
                torch.testing.assert_close(logits[path], alone, atol=2e-5, rtol=1e-5)


def test_the_engine_s_rows_of_different_lengths_keep_to_their_windows(sliding):
    prompts = [sliding.prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    expected = [sliding.hugging_face(prompt, NEW_TOKENS) for prompt in prompts]
    whole = [Request(prompt=tuple(prompt), max_new_tokens=NEW_TOKENS) for prompt in prompts]
    resumed = [
        request.model_copy(update={"generated": tuple(text[:7])}) for request, text in zip(whole, expected, strict=True)
    ]
    assert together(sliding, whole, 320, SHAPES["dynamic"]) == expected
    assert together(sliding, resumed, 320, SHAPES["chain"]) == [text[7:] for text in expected]


def test_a_draft_model_s_window_follows_the_depths_of_its_tree(sliding):
    """The target as its own drafter is always right, however its nodes lie in its cache."""
    generation = speculate(sliding, Rehearsed(sliding.target), SHAPES["fixed"], sliding.prompt(0, 30), GREEDY, 20)
    assert set(generation.accepted[:-1]) == {3}


def test_cached_columns_are_the_model_s_own(sliding, stock):
    chats = [torch.tensor(sliding.prompt(seed, length)).numpy() for seed, length in enumerate((40, 1, 17))]
    config = CacheConfig(hidden_depths=(-1, -2, -3))
    columns = dict(record_taps(sliding.target, config, chats))
    begin = 0
    for chat in chats:
        end = begin + len(chat)
        past = DynamicCache()  # given no configuration, it keeps the keys beyond the window
        with torch.no_grad():
            output = stock(torch.from_numpy(chat)[None], output_hidden_states=True, past_key_values=past)
        wanted = {f"hidden.{depth}": output.hidden_states[depth][0] for depth in config.hidden_depths}
        for layer, own in enumerate(past.layers):
            wanted[f"kv.{layer:02d}"] = torch.cat([own.keys, own.values], dim=-1)[0].transpose(0, 1).flatten(1)
        assert wanted.keys() == columns.keys()
        for name, expected in wanted.items():
            torch.testing.assert_close(columns[name][begin:end], expected, atol=2e-5, rtol=1e-5)
        begin = end


@pytest.mark.parametrize("layers", [1, 2])
def test_the_head_s_layers_have_the_target_s_windows(sliding, layers):
    """On the real residual stream they give the target's own last hidden state, in one pass and token by token."""
    target, length = sliding.target, 30
    tokens, positions = torch.tensor([sliding.prompt(0, length)]), torch.arange(length)[None]
    output = target.forward(tokens, positions, None, target.new_cache(length), (-1 - layers,))
    hidden, head = output.hidden[-1 - layers], TargetHead.of(target, layers)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    with torch.inference_mode():
        whole = head.run_last_layers(hidden, positions, mask, head.new_cache(length))
        cache, parts = head.new_cache(length), []
        for i in range(length):
            parts.append(head.run_last_layers(hidden[:, i : i + 1], positions[:, i : i + 1], None, cache))
            cache.commit(1)
    torch.testing.assert_close(whole, output.last, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(parts, dim=1), output.last, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["moa-2", "dynamic-moa-0"])
def test_target_layers_are_trained_as_they_draft(sliding, variant):
    drafter = build(sliding, VARIANTS[variant])
    batch = batch_of(sliding.target, [sliding.prompt(0, 40), sliding.prompt(1, 33)], 10, drafter.needs)
    assert is_one_model(drafter, batch, view_of(batch, drafter))


def test_target_layers_see_a_tree_s_branches_and_neighbours_as_if_alone(sliding):
    """Two sequences drafted in one pass, each with a decoy beside the truth; and the next cycle after a kept node.

    nodes   0 root   1 decoy   2 truth   3 below the decoy   4 truth
    """
    drafter = build(sliding, VARIANTS["moa-2"])
    batch = batch_of(sliding.target, [sliding.prompt(0, 40)], 10, drafter.needs)
    text = batch.tokens[0]
    ancestors = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool
    )
    with torch.no_grad():
        states = [state_at(drafter, batch.tokens, batch.taps, known) for known in (20, 28)]
        for grown in range(2):
            known = [state.slots.num_verified for state in states]
            wanted = []
            for length in known:
                alone = state_at(drafter, batch.tokens, batch.taps, length)
                steps = [drafter.step(alone, text[length + d : length + d + 1], None, d)[0] for d in range(3)]
                wanted.append(torch.stack(steps))
            rows = [(0, 1), (1, 3), (3, 5)]
            for depth, (begin, end) in enumerate(rows):
                truth = [text[length + depth : length + depth + 1] for length in known]
                nodes = torch.stack([torch.cat([torch.tensor([11])] * (end - begin - 1) + [own]) for own in truth])
                scores = drafter.score(states, nodes, ancestors[None, begin:end, :end], depth)
                for own, expected in zip(scores, wanted, strict=True):
                    torch.testing.assert_close(own[-1], expected[depth], atol=1e-5, rtol=0)
            assert grown or len(set(known)) == 2
            for state, length in zip(states, known, strict=True):
                memory = drafter.observe(pieces_of(batch.taps, length, length + 3))
                drafter.extend(state, text[length : length + 3], memory, num_kept=1)


# --- Rotary types ---


@pytest.mark.parametrize("kind", ROPE)
def test_every_accepted_rotary_type_gives_the_model_s_text_up_to_the_end_of_the_context(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPE[kind]}
    tiny = load_target(tmp_path, num_hidden_layers=2, max_position_embeddings=CONTEXT, rope_parameters=rope)
    prompts = [tiny.prompt(seed, length) for seed, length in enumerate((CONTEXT - 2, 3, 40, CONTEXT - 9))]
    counts = [min(NEW_TOKENS, CONTEXT - len(prompt)) for prompt in prompts]
    expected = [tiny.hugging_face(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    plain = PlainDecoder(tiny.target, CONTEXT)
    for shape in SHAPES.values():
        decoder = SpeculativeDecoder(tiny.target, half_right(tiny), shape, CONTEXT)
        for prompt, count, text in zip(prompts, counts, expected, strict=True):
            assert plain.generate(prompt, GREEDY, count, ()).tokens == text
            assert decoder.generate(prompt, GREEDY, count, ()).tokens == text
    requests = [Request(prompt=tuple(p), max_new_tokens=count) for p, count in zip(prompts, counts, strict=True)]
    random.Random(0).shuffle(order := list(range(len(requests))))
    found = together(tiny, [requests[i] for i in order], CONTEXT, SHAPES["chain"])
    assert found == [expected[i] for i in order]
