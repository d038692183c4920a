"""Speed-up at a batch size: both sides answer the same prompts, and the figures are those of what happened."""

import dataclasses

import pytest
from rehearsed import Rehearsed
from side_by_side import COUPLED, GREEDY, SHAPES
from tiny_targets import TinyTarget, load_target

from moray.decoding.params import SamplingParams
from moray.decoding.plain import PlainDecoder
from moray.errors import ConfigError, DataError
from moray.trees.shapes import AdaptiveShape
from pipelines.benchmarks import batch_speedup
from pipelines.benchmarks.batch_speedup import measure_batch_speedup

CHAIN = SHAPES["chain"]
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    return load_target(tmp_path_factory.mktemp("batch"))


def measure(tiny: TinyTarget, batch: int, *, params=GREEDY, noise=0.5, count=20, eos=(), num_prompts=4, rounds=2):
    prompts = [tiny.prompt(seed, 4 + 9 * seed) for seed in range(num_prompts)]
    drafter = Rehearsed(tiny.target, noise)
    return measure_batch_speedup(tiny.target, drafter, CHAIN, prompts, count, batch, eos, params, rounds=rounds)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_both_sides_give_the_target_s_own_text(tiny, batch, params):
    figures = measure(tiny, batch, params=params, eos=(5, 17))
    decoder = PlainDecoder(tiny.target, 100)
    prompts = [tiny.prompt(seed, 4 + 9 * seed) for seed in range(4)]
    answers = [decoder.generate(p, params, 20, (5, 17), sequence=i).tokens for i, p in enumerate(prompts)]
    assert figures.num_tokens == sum(map(len, answers))
    assert (figures.lossless, figures.equal_share) == (True, 1.0)
    assert (figures.batch, figures.num_prompts, figures.rounds) == (batch, 4, 2)
    for side in ("plain", "drafted"):
        assert 1 <= figures.rows_per_pass[side] <= batch
    if batch == 1:
        assert figures.rows_per_pass == {"plain": 1, "drafted": 1}


def test_tau_and_rows_are_those_of_the_target_as_its_own_drafter(tiny):
    figures = measure(tiny, 4, noise=0.0, count=21)
    assert figures.tau == CHAIN.depth + 1
    assert figures.rows_per_pass == {"plain": 4, "drafted": 4}
    assert 0 < figures.draft_share < 1


@pytest.mark.parametrize("batch", [1, 4])
def test_an_adaptive_tree_is_chosen_for_the_batch(tiny, batch):
    """Costs are measured for as many sequences as are decoded together."""
    prompts = [tiny.prompt(seed, 4 + 9 * seed) for seed in range(4)]
    shape = AdaptiveShape(type="adaptive", depth=3, breadth=2, nodes=6)
    figures = measure_batch_speedup(tiny.target, Rehearsed(tiny.target, 0.5), shape, prompts, 20, batch, (), GREEDY)
    assert figures.lossless is True


def test_rows_stay_filled_to_the_batch_size_and_no_further(tiny):
    """Six prompts of which the memory for two of the longest would hold more of the short ones."""
    figures = measure(tiny, 2, count=20, num_prompts=6, rounds=1)
    assert figures.rows_per_pass["plain"] == 2
    assert 1.5 < figures.rows_per_pass["drafted"] <= 2


def test_the_sides_take_turns_and_the_median_counts(tiny, monkeypatch):
    """Clock readings of rounds whose quotients are 2, 10 and 3."""
    turns: list[str] = []
    real = batch_speedup._Side.decode
    seconds = iter([2.0, 1.0, 10.0, 1.0, 3.0, 1.0])

    def decode(side, prompts, max_new_tokens):
        decoded = real(side, prompts, max_new_tokens)
        if max_new_tokens < 20:  # the warm-up
            return decoded
        turns.append("drafted" if side.engine.draft_schedulers else "plain")
        return dataclasses.replace(decoded, seconds=next(seconds))

    monkeypatch.setattr(batch_speedup._Side, "decode", decode)
    figures = measure(tiny, 2, rounds=3)
    assert turns == ["plain", "drafted"] * 3
    assert figures.speedup_vs_plain == pytest.approx(3)
    assert figures.speedup_quartiles == pytest.approx((2.5, 6.5))
    assert figures.plain_tokens_per_second == pytest.approx(figures.num_tokens / 3)
    assert figures.drafted_tokens_per_second == pytest.approx(figures.num_tokens)


def test_other_text_is_found(tiny, monkeypatch):
    answer = batch_speedup.answer_batch

    def wrong(engine, requests):
        generations = answer(engine, requests)
        if engine.draft_schedulers:
            generations[0].tokens[-1] += 1
        return generations

    monkeypatch.setattr(batch_speedup, "answer_batch", wrong)
    figures = measure(tiny, 2)
    assert (figures.lossless, figures.equal_share) == (False, 0.75)


@pytest.mark.parametrize("method", ["rejection", "typical"])
def test_where_texts_may_differ_nothing_is_claimed(tiny, method):
    figures = measure(tiny, 2, params=SamplingParams(temperature=0.8, acceptance_method=method), rounds=1)
    assert (figures.lossless, figures.equal_share) == (None, None)
    assert figures.speedup_vs_plain > 0


def test_what_cannot_be_measured_is_refused(tiny):
    with pytest.raises(DataError, match="4 prompts were given for a batch of 5"):
        measure(tiny, 5)
    with pytest.raises(DataError, match="the longest prompt has 31 tokens; with answers of 500"):
        measure(tiny, 2, count=500)
    with pytest.raises(ConfigError, match="rounds is 0"):
        measure(tiny, 2, rounds=0)
    with pytest.raises(ConfigError, match="batch is 0"):
        measure(tiny, 0)
