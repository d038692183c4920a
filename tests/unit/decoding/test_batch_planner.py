"""How deep an engine drafts: what was given up is tried again, and what pays is drafted."""

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
