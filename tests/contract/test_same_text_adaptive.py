"""Drafts whose depth and size change from cycle to cycle give the target's own text too."""

import pytest
from rehearsed import Rehearsed
from side_by_side import ADAPTIVE, COUPLED, FILTERED, GREEDY, SHAPES, plainly, speculate
from tiny_drafters import SEVERAL_LAYER_COUNTS, VARIANTS, build
from tiny_targets import MAX_POSITIONS

from moray.decoding.engine import engine as engine_module
from moray.decoding.generate import SpeculativeDecoder, runner_for
from moray.decoding.params import SamplingParams
from moray.decoding.planning import measuring

TYPICAL = SamplingParams(temperature=0.8, seed=7, acceptance_method="typical")


@pytest.mark.usefixtures("moody")
def test_adaptive_drafts_of_every_drafter_give_the_same_text(tiny, learnt, variant, adaptive):
    target, drafter = tiny("llama"), learnt("llama", variant)
    decoder = SpeculativeDecoder(target.target, drafter, adaptive, MAX_POSITIONS)
    for params, count in ((GREEDY, 40), (COUPLED, 20)):
        generation = decoder.generate(target.prompt(), params, count, ())
        assert generation.tokens == plainly(target, target.prompt(), params, count)
        if not variant.startswith("ngram"):  # it ends drafts itself
            assert len(set(generation.drafted)) >= 3, "the depths did not vary"


@pytest.mark.usefixtures("moody", "unchecked_shapes")
@pytest.mark.parametrize("params", [GREEDY, COUPLED, FILTERED], ids=["greedy", "coupled", "filtered"])
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_every_degree_of_acceptance_gives_the_same_text_at_every_depth(tiny, adaptive, params, noise):
    target = tiny("qwen2")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, noise), adaptive, MAX_POSITIONS)
    drafted, accepted = set(), set()
    for prompt in (target.prompt(), target.prompt(4, 20)):
        generation = decoder.generate(prompt, params, 40, ())
        assert generation.tokens == plainly(target, prompt, params, 40)
        assert all(a <= d for a, d in zip(generation.accepted, generation.drafted, strict=True))
        drafted |= set(generation.drafted)
        accepted |= set(generation.accepted)
    assert drafted == {0, 1, 2, 3, 4}, "no draft, and every depth"
    assert len(accepted) >= 3


@pytest.mark.usefixtures("moody")
def test_adaptive_drafts_sample_typically_too(tiny, adaptive):
    target = tiny("llama")
    decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, 0.5), adaptive, MAX_POSITIONS)
    generation = decoder.generate(target.prompt(), TYPICAL, 40, ())
    assert len(generation.tokens) == 40
    assert 0 in generation.drafted


def test_measuring_costs_leaves_nothing_behind(tiny, greedy, learnt, adaptive, monkeypatch):
    """With the real clock: passes and drafts are forgotten, and measured once."""
    target, drafter = tiny("llama"), learnt("llama", "moa-1")
    decoder = SpeculativeDecoder(target.target, drafter, adaptive, MAX_POSITIONS)
    measured = []
    measure = engine_module.measure_costs
    monkeypatch.setattr(engine_module, "measure_costs", lambda *asked: measured.append(measure(*asked)) or measured[-1])
    for _ in range(2):
        assert decoder.generate(target.prompt(), GREEDY, 40, ()).tokens == greedy("llama")
    (table,) = measured
    ((rows, costs),) = table.by_rows.items()
    (drafts,) = costs.draft.values()
    assert rows == 1
    assert [size for size, _ in costs.verify][-1] == adaptive.num_nodes + 1
    assert [size for size, _ in drafts] == [1, 2, 3, 4]
    assert min(seconds for _, seconds in [*costs.verify, *drafts]) > 0


def test_decoders_that_share_a_runner_measure_its_passes_once(tiny, adaptive, monkeypatch):
    target, verified = tiny("llama"), []
    verify = measuring._verify
    monkeypatch.setattr(measuring, "_verify", lambda *asked: verified.append(asked) or verify(*asked))
    runner = runner_for(target.target, MAX_POSITIONS, adaptive.num_nodes)
    tables = []
    for hit_rate in (0.5, 1.0):
        decoder = SpeculativeDecoder(target.target, Rehearsed(target.target, hit_rate), adaptive, MAX_POSITIONS, runner)
        decoder.generate(target.prompt(), GREEDY, 2, ())
        tables.append((len(verified), dict(runner.pass_seconds)))
    assert tables[0] == tables[1]
    assert tables[0][0] > 0


def test_costs_are_measured_where_the_context_ends(tiny, adaptive):
    target = tiny("llama")
    for room in (1, 3):
        prompt = target.prompt(5, MAX_POSITIONS - room)
        plain = plainly(target, prompt, GREEDY, 40)
        assert speculate(target, Rehearsed(target.target), adaptive, prompt, GREEDY, 40).tokens == plain


REPETITIVE = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7]


@pytest.mark.usefixtures("moody", "unchecked_shapes")
@pytest.mark.parametrize("params", [GREEDY, FILTERED], ids=["greedy", "filtered"])
def test_a_drafter_that_stops_early_costs_no_token(tiny, params):
    """Prompt lookup ends its drafts wherever nothing matches, at other levels in every cycle."""
    target = tiny("llama")
    drafter = build(target, VARIANTS["ngram-0"])
    for shape in (*SHAPES.values(), *ADAPTIVE.values()):
        decoder = SpeculativeDecoder(target.target, drafter, shape, MAX_POSITIONS)
        drafted = set()
        for prompt in (REPETITIVE, [*REPETITIVE, *target.prompt(), *target.prompt()[:4]]):
            generation = decoder.generate(prompt, params, 30, ())
            assert generation.tokens == plainly(target, prompt, params, 30)
            drafted |= set(generation.drafted)
        assert 0 in drafted
        assert len(drafted) >= 2, "no draft was cut short"


@pytest.mark.usefixtures("moody")
@pytest.mark.parametrize("name", SEVERAL_LAYER_COUNTS)
def test_values_of_n_that_change_from_cycle_to_cycle_give_the_same_text(tiny, learnt, name, adaptive):
    target, drafter = tiny("llama"), learnt("llama", name)
    decoder = SpeculativeDecoder(target.target, drafter, adaptive, MAX_POSITIONS)
    for params, count in ((GREEDY, 40), (COUPLED, 30)):
        generation = decoder.generate(target.prompt(4, 20), params, count, ())
        assert generation.tokens == plainly(target, target.prompt(4, 20), params, count)
        used = {e for e, drafted in zip(generation.layer_counts, generation.drafted, strict=True) if drafted}
        assert len(used) >= 2, "the values of N did not vary"


@pytest.mark.parametrize("name", SEVERAL_LAYER_COUNTS)
def test_a_fixed_n_is_the_only_one(tiny, learnt, name):
    target = tiny("llama")
    prompt = target.prompt()
    for num_target_layers in VARIANTS[name].layer_counts:
        drafter = build(target, VARIANTS[name])
        drafter.load_state_dict(learnt("llama", name).state_dict())
        drafter.fix_num_target_layers(num_target_layers)
        generation = speculate(target, drafter, SHAPES["dynamic"], prompt, GREEDY, 40)
        assert generation.tokens == plainly(target, prompt, GREEDY, 40)
        assert set(generation.layer_counts) == {num_target_layers}
        assert max(generation.accepted) > 0
