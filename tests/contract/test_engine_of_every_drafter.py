"""Sequences that the engine answers side by side: each gets the text that it gets alone, with every drafter."""

import pytest
import torch
from rehearsed import Rehearsed
from shape_checks import unchecked
from side_by_side import ADAPTIVE, COUPLED, GREEDY, SHAPES
from tiny_drafters import VARIANTS, build
from tiny_targets import MAX_POSITIONS, TinyTarget, load_target

from moray.decoding.batch import answer_batch
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.engine.kv_cache import BatchedKVCache
from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.generation import Generation
from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.decoding.request import Request
from moray.decoding.sampling.stop import StopStrings
from moray.drafters.base import Drafter
from moray.trees.shapes import SparseShape

CHAIN, DYNAMIC = SHAPES["chain"], SHAPES["dynamic"]
LENGTHS = (9, 1, 270, 30, 17)  # one of them is read in two pieces
EOS = (5, 17)
CAPACITY = 320


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def half_right(tiny) -> Rehearsed:
    """A drafter that is right about every other time."""
    return Rehearsed(tiny.target, 0.5)


def prompts_of(tiny: TinyTarget) -> list[list[int]]:
    return [tiny.prompt(seed, length) for seed, length in enumerate(LENGTHS)]


def alone(tiny: TinyTarget, prompts, params, count: int, eos=EOS, capacity: int = CAPACITY) -> list[Generation]:
    decoder = PlainDecoder(tiny.target, capacity)
    return [decoder.generate(p, params, count, eos, sequence=3 * i) for i, p in enumerate(prompts)]


def engine_of(
    tiny: TinyTarget, drafter: Drafter, shape, *, batch=3, eos=EOS, capacity=CAPACITY, decode=None, **more
) -> Engine:
    """With memory for `batch` sequences of `capacity` tokens."""
    width = -(-(capacity + shape.num_nodes + 1) // 64) * 64
    config = EngineConfig(max_num_seqs=batch, kv_cache_tokens=batch * width, max_model_len=capacity, tree=shape, **more)
    drafts = {"drafter": LocalDrafts(drafter, capacity, shape.num_expanded)}
    return Engine(tiny.target, config, eos, drafts=drafts, decode=decode)


def requests_of(prompts, params, count: int, capacity: int = CAPACITY, **more) -> list[Request]:
    return [
        Request(
            prompt=tuple(prompt),
            params=params,
            max_new_tokens=min(count, capacity - len(prompt)),
            sequence=3 * index,
            **more,
        )
        for index, prompt in enumerate(prompts)
    ]


def together(
    tiny: TinyTarget, drafter: Drafter, shape, prompts, params, count, *, capacity=CAPACITY, **more
) -> list[Generation]:
    engine = engine_of(tiny, drafter, shape, capacity=capacity, **more)
    return answer_batch(engine, requests_of(prompts, params, count, capacity))


def texts(generations: list[Generation]) -> list[tuple[list[int], str]]:
    return [(generation.tokens, generation.finish_reason) for generation in generations]


@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC], ids=["chain", "dynamic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_drafter_gives_each_sequence_its_own_text(tiny, variant, shape):
    drafter, prompts = build(tiny, VARIANTS[variant]), prompts_of(tiny)[:3]
    greedy = together(tiny, drafter, shape, prompts, GREEDY, 14, eos=())
    assert texts(greedy) == texts(alone(tiny, prompts, GREEDY, 14, ()))
    with unchecked():
        sampled = together(tiny, drafter, shape, prompts, COUPLED, 14, eos=())
    assert texts(sampled) == texts(alone(tiny, prompts, COUPLED, 14, ()))


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_that_accept_different_paths_stay_apart(tiny, half_right, shape, params):
    prompts = prompts_of(tiny)
    generations = together(tiny, half_right, shape, prompts, params, 40)
    assert texts(generations) == texts(alone(tiny, prompts, params, 40))
    assert {reason for _, reason in texts(generations)} == {"stop", "length"}
    accepted = {count for generation in generations for count in generation.accepted}
    assert {0, 1, 2} <= accepted, "paths of every length"


@pytest.mark.usefixtures("unchecked_shapes")
def test_sparse_trees_and_the_other_methods(tiny, half_right):
    """Rejection and typical acceptance draw by sequence and position: alone, the same text comes out."""
    sparse = SparseShape(type="sparse", paths=((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
    prompts = prompts_of(tiny)
    for method in ("rejection", "typical"):
        params = SamplingParams(temperature=0.8, seed=2, acceptance_method=method)
        for shape in (sparse, CHAIN):
            decoder = SpeculativeDecoder(tiny.target, half_right, shape, CAPACITY)
            expected = [decoder.generate(p, params, 20, EOS, sequence=3 * i) for i, p in enumerate(prompts)]
            generations = together(tiny, half_right, shape, prompts, params, 20)
            assert texts(generations) == texts(expected)
            assert [g.accepted for g in generations] == [g.accepted for g in expected]


@pytest.mark.usefixtures("unchecked_shapes")
def test_one_sequence_has_the_cycles_of_the_decoder_for_one(tiny):
    prompt = tiny.prompt()
    for variant in ("moa-1", "eagle-0", "pretrained-0", "ngram-0"):
        drafter = build(tiny, VARIANTS[variant])
        for shape in (CHAIN, DYNAMIC):
            expected = SpeculativeDecoder(tiny.target, drafter, shape, CAPACITY).generate(prompt, COUPLED, 30, ())
            (generation,) = together(tiny, drafter, shape, [prompt], COUPLED, 30, batch=1, eos=())
            for name in ("tokens", "accepted", "emitted", "drafted"):
                assert getattr(generation, name) == getattr(expected, name), (variant, shape.name, name)


@pytest.mark.usefixtures("unchecked_shapes")
def test_neighbours_change_no_cycle(tiny):
    """What is observed of a row is what is observed of it alone, so its drafts are accepted as alone."""
    prompts = prompts_of(tiny)
    for variant in ("moa-0", "moa-2", "eagle-0", "glide-0", "medusa-0", "independent-0"):
        drafter = build(tiny, VARIANTS[variant])
        for shape in (CHAIN, DYNAMIC):
            decoder = SpeculativeDecoder(tiny.target, drafter, shape, CAPACITY)
            expected = [decoder.generate(p, COUPLED, 16, EOS, sequence=3 * i) for i, p in enumerate(prompts)]
            generations = together(tiny, drafter, shape, prompts, COUPLED, 16)
            assert [g.accepted for g in generations] == [g.accepted for g in expected], (variant, shape.name)


def test_a_pass_has_as_many_rows_as_sequences_run(tiny, half_right, monkeypatch):
    """One that ends leaves, and the next one in line takes its place."""
    rows: list[int] = []
    forward = type(tiny.target).forward

    def counted(self, tokens, positions, mask, cache, *rest):
        if isinstance(cache, BatchedKVCache) and tokens.shape[1] < 9:
            rows.append(tokens.shape[0])
        return forward(self, tokens, positions, mask, cache, *rest)

    prompts = [tiny.prompt(seed, 9) for seed in range(3)]
    answers = [tiny.hugging_face(prompt, 30) for prompt in prompts]
    early = answers[0][4]
    cut = [tokens[: tokens.index(early) + 1] if early in tokens else tokens for tokens in answers]
    monkeypatch.setattr(type(tiny.target), "forward", counted)
    engine = engine_of(tiny, half_right, CHAIN, batch=2, eos=(early,))
    generations = answer_batch(engine, requests_of(prompts, GREEDY, 30))
    assert [g.tokens for g in generations] == cut
    assert len(cut[0]) <= 5 < len(cut[1])
    assert sum(rows) == sum(g.num_cycles for g in generations), "no row was idle"
    assert len(rows) == engine.stats.num_passes
    assert rows[:-1].count(2) >= generations[0].num_cycles + 1, "the third took the place of the first"
    assert max(rows) == 2
    assert rows[-1] == 1


def test_the_end_of_the_context(tiny, half_right):
    prompts = [tiny.prompt(0, 20), tiny.prompt(1, 47), tiny.prompt(2, 3)]
    for shape in (CHAIN, DYNAMIC):
        generations = together(tiny, half_right, shape, prompts, GREEDY, 40, eos=(), capacity=48)
        assert texts(generations) == texts(alone(tiny, prompts, GREEDY, 40, (), 48))
        assert [len(g.tokens) for g in generations] == [28, 1, 40]
    full = [tiny.prompt(0, MAX_POSITIONS - 6), tiny.prompt(1, MAX_POSITIONS - 2)]
    generations = together(tiny, half_right, CHAIN, full, GREEDY, 40, eos=(), capacity=MAX_POSITIONS)
    assert texts(generations) == texts(alone(tiny, full, GREEDY, 40, (), MAX_POSITIONS))


def test_stop_strings_end_an_answer(tiny, half_right):
    prompts = prompts_of(tiny)[:3]
    decode = lambda tokens: "".join(f"<{t}>" for t in tokens)  # noqa: E731
    stop = StopStrings([f"<{tiny.hugging_face(prompts[0], 12)[9]}>"], decode)
    engine = engine_of(tiny, half_right, CHAIN, eos=(), decode=decode)
    generations = answer_batch(engine, requests_of(prompts, GREEDY, 30, stop=stop.strings))
    decoder = PlainDecoder(tiny.target, CAPACITY)
    assert texts(generations) == texts([decoder.generate(p, GREEDY, 30, (), stop=stop) for p in prompts])
    assert generations[0].finish_reason == "stop"


def test_an_engine_is_used_again_and_again(tiny, half_right):
    engine = engine_of(tiny, half_right, DYNAMIC, batch=2, eos=())
    for seed in range(3):
        prompts = [tiny.prompt(seed + i, 5 + 20 * i) for i in range(3)]
        assert [g.tokens for g in answer_batch(engine, requests_of(prompts, GREEDY, 15))] == [
            g.tokens for g in alone(tiny, prompts, GREEDY, 15, ())
        ]
    assert engine.kv_used == engine.num_running == 0


def test_a_cycle_waits_for_the_device_once(tiny, monkeypatch):
    drafter, prompts = build(tiny, VARIANTS["moa-0"]), prompts_of(tiny)
    engine = engine_of(tiny, drafter, DYNAMIC, eos=())
    reads: list[int] = []
    plain, begin = torch.Tensor.tolist, Engine._begin
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or plain(self))
    monkeypatch.setattr(Engine, "_begin", lambda *rest: reads.append(0) or begin(*rest))
    for name in ("item", "__int__", "__bool__", "__index__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the device is waited for"))
    with unchecked():
        answer_batch(engine, requests_of(prompts, GREEDY, 12))
    assert reads.count(1) == engine.stats.num_passes + reads.count(0)


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("kind", ["adaptive chain", "adaptive tree"])
def test_an_engine_of_many_chooses_n_depth_and_nodes(tiny, kind):
    """As for one sequence: with costs that change at every look, all of them vary, and texts stay what they are."""
    drafter = build(tiny, VARIANTS["dynamic-moa-0"])
    shape = ADAPTIVE[kind]
    config = EngineConfig(kv_cache_tokens=4 * CAPACITY, tree=shape)
    engine = Engine(tiny.target, config, (), drafts={"d": LocalDrafts(drafter, CAPACITY, shape.num_expanded)})
    engine.measure_costs({"d": drafter})
    prompts = [tiny.prompt(row, 10 + row) for row in range(4)]
    asked = [Request(prompt=tuple(prompt), max_new_tokens=30) for prompt in prompts]
    made = answer_batch(engine, asked)
    plain = PlainDecoder(tiny.target, CAPACITY)
    for prompt, generation in zip(prompts, made, strict=True):
        assert generation.tokens == plain.generate(prompt, SamplingParams(), 30, ()).tokens
    drafted = [(n, depth) for each in made for n, depth in zip(each.layer_counts, each.drafted, strict=True) if depth]
    assert len({n for n, _ in drafted}) >= 2
    assert len({depth for _, depth in drafted}) >= 3
    per_draft = engine.stats.num_draft_tokens / engine.stats.num_drafts
    full = sum(shape.at(depth).num_nodes for _, depth in drafted) / len(drafted)
    assert per_draft == full if kind == "adaptive chain" else per_draft < 0.8 * full
