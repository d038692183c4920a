"""How deep an engine drafts: what was given up is tried again, and what pays is drafted."""

from itertools import pairwise

import pytest
from side_by_side import GREEDY
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target

from moray.decoding.batch_planner import BatchPlanner
from moray.decoding.costs import Costs
from moray.decoding.drafts import LocalDrafts
from moray.decoding.engine import Engine
from moray.decoding.engine_config import EngineConfig
from moray.decoding.request import Request
from moray.trees.grow import root_alone
from moray.trees.shapes import AdaptiveShape

SHAPE = AdaptiveShape(type="adaptive", depth=6)
COSTS = {1: Costs(verify=[(1, 0.010), (8, 0.011)], draft=[(1, 0.002), (6, 0.006)])}


def cycles_without(planner: BatchPlanner) -> int:
    """Until drafting is tried again."""
    for cycle in range(500):
        if planner.next_shape(1, 1) is not None:
            return cycle
        planner.forget()
    pytest.fail("drafting never came back")


def test_refused_drafts_end_and_come_back():
    planner = BatchPlanner(SHAPE)
    planner.know(COSTS)
    assert planner.next_shape(1, 1) is not None
    for _ in range(100):
        planner.record(6, 0)
    assert planner.next_shape(1, 1) is None
    assert cycles_without(planner) > 5, "not at once: it was a loss"


def test_drafts_that_take_too_long_end_and_come_back():
    planner = BatchPlanner(SHAPE)
    planner.know(COSTS)
    for _ in range(100):
        planner.record_draft(1, 6, 0.1)
        planner.record(6, 6)
    assert planner.next_shape(1, 1) is None
    assert cycles_without(planner) > 5


def test_the_larger_the_batch_the_shallower_the_drafts():
    """One row's further tokens are nearly free; of 32 rows each costs as much as another row's pass."""
    planner = BatchPlanner(SHAPE)
    planner.know(
        {
            1: Costs(verify=[(1, 0.010), (7, 0.011)], draft=[(1, 0.001), (6, 0.003)]),
            8: Costs(verify=[(1, 0.012), (7, 0.030)], draft=[(1, 0.002), (6, 0.009)]),
            32: Costs(verify=[(1, 0.020), (7, 0.140)], draft=[(1, 0.010), (6, 0.050)]),
        }
    )
    for number in range(140):
        planner.record(6, number % 7)
    shapes = [planner.next_shape(rows, rows) for rows in (1, 4, 8, 20, 32, 64)]
    depths = [0 if shape is None else shape.depth for shape in shapes]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[-2] == depths[-1] == 0, depths
    assert depths[0] >= depths[1] >= depths[2], "between the measured sizes lines are drawn"


def test_costs_between_measured_sizes_lie_on_a_line(monkeypatch):
    planner = BatchPlanner(SHAPE)
    planner.know({rows: Costs(verify=[(1, 0.01 * rows)], draft=[(1, 0.001)]) for rows in (2, 10)})
    seen = []
    monkeypatch.setattr(planner._verify, "record", lambda expected, seconds: seen.append(expected))
    for rows in (1, 2, 4, 10, 50):
        planner.record_pass(rows, 1, 0.0)
    assert seen == pytest.approx([0.02, 0.02, 0.04, 0.10, 0.10])


def tries_of(planner: BatchPlanner, num_cycles: int, num_rows: int, num_accepted: int) -> list[int]:
    """Depths of the drafts of so many cycles, of which so much is accepted; 0 where there was none."""
    depths = []
    for _ in range(num_cycles):
        shape = planner.next_shape(num_rows, num_rows)
        if shape is None:
            planner.forget()
        else:
            planner.record_draft(num_rows, shape.depth, COSTS[1].draft_seconds(shape.depth))
            for _ in range(num_rows):
                planner.record(shape.depth, min(num_accepted, shape.depth))
        depths.append(0 if shape is None else shape.depth)
    return depths


def test_what_was_given_up_is_tried_again_a_little_and_more_and_more_rarely():
    planner = BatchPlanner(SHAPE)
    planner.know(COSTS)
    depths = tries_of(planner, 6000, 8, 0)
    first = depths.index(0)
    tries = [cycle for cycle, depth in enumerate(depths) if depth and cycle > first]
    assert all(depths[cycle] == 1 for cycle in tries), "a deep draft that is refused is dear"
    pauses = [after - before for before, after in pairwise([first, *tries])]
    assert len(tries) >= 4
    assert pauses == sorted(pauses)
    assert pauses[-1] > 3 * pauses[0]
    assert len(tries) < 0.01 * len(depths)


def test_it_is_tried_for_a_few_sequences_alone():
    planner = BatchPlanner(SHAPE)
    planner.know(COSTS)
    assert planner.most_drafted is None
    tries_of(planner, 300, 8, 0)
    assert planner.most_drafted == 4
    depths = tries_of(planner, 500, 8, 6)
    assert depths[-1] == 6
    assert planner.most_drafted is None, "it has paid"


def test_what_a_few_drafts_take_says_nothing_of_many():
    planner = BatchPlanner(SHAPE)
    planner.know({32: Costs(verify=[(1, 0.010), (8, 0.011)], draft=[(1, 0.001), (6, 0.001)])})
    planner.forget()
    planner.record_ask(4, 0.010)
    planner.record_draft(4, 1, 0.1)
    for _ in range(4):
        planner.record(1, 1)
    assert planner.next_shape(32, 32) is not None


def test_asks_for_single_sequences_are_not_what_each_of_many_costs():
    """They are as frequent as those for all the others, for somebody always has just begun."""
    planner = BatchPlanner(SHAPE)
    planner.know({32: Costs(verify=[(1, 0.020), (8, 0.030)], draft=[(1, 0.001), (6, 0.001)])})
    for _ in range(50):
        planner.record_ask(1, 0.003)
        planner.record_ask(31, 0.006)
        planner.record(6, 2)
    assert planner.next_shape(32, 32) is not None


def engine_of(tmp_path, variant: str, num_rows: int = 1) -> tuple[Engine, LocalDrafts, list[int]]:
    """Drafts are cheap, by what is said; the third is to be filled with how many were asked for, time by time."""
    tiny = load_target(tmp_path)
    source = LocalDrafts(build(tiny, VARIANTS[variant]), 320, 64)
    engine = Engine(tiny.target, EngineConfig(kv_tokens=8192, tree=SHAPE), (), drafts={"d": source})
    engine.drafting["d"].planner.know({1: Costs(verify=[(1, 1.0), (8, 1.0)], draft=[(1, 1e-9), (6, 1e-9)])})
    for number in range(num_rows):
        engine.submit(Request(prompt=tuple(tiny.prompt(number)), params=GREEDY, max_new_tokens=60))
    asked: list[int] = []
    ask = source.ask
    source.ask = lambda asks: asked.append(len(asks)) or ask(asks)
    return engine, source, asked


def test_an_engine_tries_for_a_few_sequences_alone(tmp_path):
    engine, _, asked = engine_of(tmp_path, "moa-0", num_rows=10)
    planner = engine.drafting["d"].planner
    planner.forget()
    while not asked:
        engine.step()
    assert asked[0] == 4


def test_who_has_no_drafter_yet_has_not_given_up(monkeypatch, tmp_path):
    """Drafts are wanted, and the first ones are as deep as ever: places at drafters are found while cycles pass."""
    engine, source, asked = engine_of(tmp_path, "moa-0")
    planner = engine.drafting["d"].planner
    monkeypatch.setattr(source, "can_draft", lambda number: False)
    for _ in range(8):
        engine.step()
    assert not asked
    monkeypatch.undo()
    assert planner.most_drafted is None
    engine.step()
    assert engine.drafting["d"].planner.next_shape(1, 1) == SHAPE.at(6)


def test_a_drafter_without_ideas_is_not_asked_for_ever(tmp_path):
    """Where nothing matches, prompt lookup answers with the root alone: nothing is ever refused."""
    engine, source, asked = engine_of(tmp_path, "ngram-0", num_rows=8)
    collect = source.collect
    roots = lambda trees: {number: root_alone(tree.tokens[:1]) for number, tree in trees.items()}  # noqa: E731
    source.collect = lambda numbers: roots(collect(numbers))
    engine.drafting["d"].planner.know({1: Costs(verify=[(1, 1.0), (8, 1.5)], draft=[(1, 0.1), (6, 0.1)])})
    num_steps = 0
    while engine.is_busy:
        engine.step()
        num_steps += 1
    assert 0 < len(asked) < 0.5 * num_steps


def test_what_pays_again_is_soon_as_deep_as_it_was():
    planner = BatchPlanner(SHAPE)
    planner.know(COSTS)
    tries_of(planner, 300, 8, 0)
    depths = tries_of(planner, 2000, 8, 6)
    back = next(cycle for cycle, depth in enumerate(depths) if depth)
    assert depths[back : back + 4] == [1, 2, 4, 6]
    assert set(depths[back + 4 :]) == {6}


def test_asking_has_its_price():
    """Of sixteen rows, telling their drafter what is new may take longer than what it drafts saves."""
    planner = BatchPlanner(SHAPE)
    planner.know({16: Costs(verify=[(1, 0.010), (8, 0.015)], draft=[(1, 0.001), (6, 0.001)])})
    for _ in range(50):
        planner.record(6, 1)
    assert planner.next_shape(16, 16) is not None
    for _ in range(50):
        planner.record_ask(16, 0.020)
    assert planner.next_shape(16, 16) is None
    planner.record_draft(16, 6, 0.001)
    for _ in range(300):
        planner.forget()
    assert planner.next_shape(16, 16) is not None, "it is not believed for ever"
    planner.record_draft(16, 1, 0.001)
    for _ in range(50):
        planner.record(6, 1)
    assert planner.next_shape(16, 16) is not None
    planner.record_ask(16, 0.020)
    assert planner.next_shape(16, 16) is None, "but at once where it is as it was"


def test_telling_a_whole_prompt_is_no_reason_not_to_draft(monkeypatch, tmp_path):
    """Nor is the first time that anything is done."""
    tiny = load_target(tmp_path)
    source = LocalDrafts(build(tiny, VARIANTS["moa-0"]), 320, 64)
    engine = Engine(tiny.target, EngineConfig(kv_tokens=1024, tree=SHAPE), (), drafts={"d": source})
    planner, asked = engine.drafting["d"].planner, []
    planner.know(COSTS)
    monkeypatch.setattr(planner, "record_ask", lambda count, seconds: asked.append(count))
    engine.submit(Request(prompt=tuple(tiny.prompt(length=40)), params=GREEDY, max_new_tokens=6))
    drafts = []
    ask = source.ask
    source.ask = lambda asks: drafts.append(len(asks)) or ask(asks)
    while engine.is_busy:
        engine.step()
    assert len(drafts) - 1 == len(asked) > 0


def test_an_engine_says_when_it_has_not_drafted(monkeypatch, tmp_path):
    tiny = load_target(tmp_path)
    source = LocalDrafts(build(tiny, VARIANTS["moa-0"]), 320, 64)
    engine = Engine(tiny.target, EngineConfig(kv_tokens=1024, tree=SHAPE), (), drafts={"d": source})
    planner, forgotten = engine.drafting["d"].planner, []
    planner.know({1: Costs(verify=[(1, 1e-4), (8, 1e-4)], draft=[(1, 5e-5), (6, 3e-4)])})
    monkeypatch.setattr(planner, "forget", lambda: forgotten.append(True))
    engine.submit(Request(prompt=tuple(tiny.prompt()), params=GREEDY, max_new_tokens=100))
    levels = []
    while engine.is_busy:
        levels += [update.num_levels for update in engine.step()]
    assert len(forgotten) == levels.count(0) - 1 > 0, "the first token is chosen without a cycle"
