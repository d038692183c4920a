"""How deep an engine drafts: what was given up is tried again, and what pays is drafted."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from side_by_side import GREEDY
from tiny_drafters import VARIANTS, build
from tiny_targets import load_target

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import DraftJob, LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.planning.controller import DraftPlan, SpeculationController
from moray.decoding.planning.costs import Costs, CostTable
from moray.decoding.planning.probing import NUM_TRIAL_DRAFTS
from moray.decoding.request import Request
from moray.drafters.base import Memory
from moray.trees.grow import root_alone
from moray.trees.shapes import AdaptiveShape
from moray.trees.tree import TokenTree

SHAPE = AdaptiveShape(type="adaptive", depth=6)


def costs_of(verify: list[tuple[int, float]], draft: list[tuple[int, float]]) -> Costs:
    """Costs of a drafter without a choice of N."""
    return Costs(verify, {0: draft})


COSTS = {1: costs_of(verify=[(1, 0.010), (8, 0.011)], draft=[(1, 0.002), (6, 0.006)])}


DEEP, FLAT = DraftPlan(SHAPE.at(6)), DraftPlan(SHAPE.at(1))


def depth_of(plan: DraftPlan | None) -> int:
    return 0 if plan is None else plan.shape.depth


def cycles_without(own: SpeculationController) -> int:
    """Until drafting is tried again."""
    for cycle in range(500):
        if own.plan(1, 1) is not None:
            return cycle
        own.pause(1)
    pytest.fail("drafting never came back")


def test_refused_drafts_end_and_come_back():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    assert own.plan(1, 1) is not None
    for _ in range(100):
        own.record(6, 0)
    assert own.plan(1, 1) is None
    assert cycles_without(own) > 5, "not at once: it was a loss"


def test_drafts_that_take_too_long_end_and_come_back():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    for _ in range(100):
        own.record_draft(DEEP, 1, 1, 0.1)
        own.record(6, 6)
    assert own.plan(1, 1) is None
    assert cycles_without(own) > 5


def test_the_larger_the_batch_the_shallower_the_drafts():
    """One row's further tokens are nearly free; of 32 rows each costs as much as another row's pass."""
    own = SpeculationController(SHAPE)
    own.set_costs(
        CostTable(
            {
                1: costs_of(verify=[(1, 0.010), (7, 0.011)], draft=[(1, 0.001), (6, 0.003)]),
                8: costs_of(verify=[(1, 0.012), (7, 0.030)], draft=[(1, 0.002), (6, 0.009)]),
                32: costs_of(verify=[(1, 0.020), (7, 0.140)], draft=[(1, 0.010), (6, 0.050)]),
            }
        )
    )
    for number in range(140):
        own.record(6, number % 7)
    depths = [depth_of(own.plan(rows, rows)) for rows in (1, 4, 8, 20, 32, 64)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[-2] == depths[-1] == 0, depths
    assert depths[0] >= depths[1] >= depths[2], "between the measured sizes lines are drawn"


def test_costs_between_measured_sizes_lie_on_a_line(monkeypatch):
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable({rows: costs_of(verify=[(1, 0.01 * rows)], draft=[(1, 0.001)]) for rows in (2, 10)}))
    seen = []
    monkeypatch.setattr(own._costs._verify, "record", lambda expected, seconds: seen.append(expected))
    for rows in (1, 2, 4, 10, 50):
        own.record_pass(rows, 0, 1.0)
    assert seen == pytest.approx([0.02, 0.02, 0.04, 0.10, 0.10])


def tries_of(own: SpeculationController, num_cycles: int, num_rows: int, num_accepted: int) -> list[int]:
    """Depths of the drafts of so many cycles, of which so much is accepted; 0 where there was none."""
    depths = []
    for _ in range(num_cycles):
        plan = own.plan(num_rows, num_rows)
        depth = depth_of(plan)
        if plan is None:
            own.pause(num_rows)
        else:
            num_drafted = min(num_rows, NUM_TRIAL_DRAFTS) if own.is_in_trial else num_rows
            own.record_draft(plan, num_drafted, num_rows, COSTS[1].draft_seconds(depth, 0))
            for _ in range(num_drafted):
                own.record(depth, min(num_accepted, depth))
        depths.append(depth)
    return depths


def test_what_was_given_up_is_tried_again_a_little_and_more_and_more_rarely():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    depths = tries_of(own, 6000, 8, 0)
    first = depths.index(0)
    attempts = [cycle for cycle, depth in enumerate(depths) if depth and cycle > first]
    assert all(depths[cycle] == 1 for cycle in attempts), "a deep draft that is refused is dear"
    pauses = [after - before for before, after in pairwise([first, *attempts])]
    assert len(attempts) >= 4
    assert pauses[:5] == sorted(pauses[:5])
    assert min(pauses[5:]) > 3 * pauses[0]
    assert len(attempts) < 0.01 * len(depths)


def test_many_are_tried_more_rarely_than_few():
    """At the same costs, where all is refused."""
    counts = {}
    for num_rows in (1, 4, 32):
        own = SpeculationController(SHAPE)
        own.set_costs(CostTable(COSTS))
        counts[num_rows] = sum(depth > 0 for depth in tries_of(own, 9000, num_rows, 0)[3000:])
    assert 0 < counts[32] == counts[4] < 0.8 * counts[1], counts


@pytest.mark.parametrize("num_rows", [1, 8])
def test_costs_measured_beside_other_work_do_not_end_drafting_of_many(num_rows):
    own, true = SpeculationController(SHAPE), COSTS[1]
    own.set_costs(CostTable({1: costs_of([(n, s * (1 if n == 1 else 8)) for n, s in true.verify], true.draft[0])}))
    depths = []
    for cycle in range(300):
        plan = own.plan(num_rows, num_rows)
        depth = depth_of(plan)
        if plan is None:
            own.pause(num_rows)
        else:
            num_drafted = min(num_rows, NUM_TRIAL_DRAFTS) if own.is_in_trial else num_rows
            own.record_draft(plan, num_drafted, num_rows, true.draft_seconds(depth, 0))
            for row in range(num_drafted):
                own.record(depth, min((1, 3, 0, 2)[(cycle + row) % 4], depth))
        own.record_pass(num_rows, depth, true.verify_seconds(1 + depth))
        depths.append(depth)
    assert depths[0] == 0
    assert depths[200:].count(0) < 10


def test_who_is_alone_again_does_not_wait_as_many_did():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    tries_of(own, 3000, 32, 0)
    _pause(own, 32)  # what was left of one
    pauses = {num_rows: _pause(own, num_rows) for num_rows in (32, 1)}
    assert 0 < pauses[1] < 0.6 * pauses[32], pauses


def _pause(own: SpeculationController, num_rows: int) -> int:
    """Cycles until drafts are tried again; that trial fails as well."""
    count = 0
    while own.plan(num_rows, num_rows) is None:
        own.pause(num_rows)
        count += 1
    for _ in range(NUM_TRIAL_DRAFTS):
        own.record(1, 0)
    return count


def test_it_is_tried_with_a_few_drafts():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    assert not own.is_in_trial
    tries_of(own, 300, 8, 0)
    assert own.is_in_trial
    depths = tries_of(own, 500, 8, 6)
    assert depths[-1] == 6
    assert not own.is_in_trial, "it has paid"


def test_it_is_tried_until_it_is_known_what_became_of_the_drafts():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    own.record_draft(DEEP, 1, 8, 0.006)
    own.pause(8)
    for _ in range(4):
        assert own.is_in_trial
        own.record_draft(FLAT, 1, 8, 0.002)
        assert own.plan(8, 8) == DraftPlan(SHAPE.at(1)), "not deeper before that"
        own.record(1, 1)
    assert not own.is_in_trial


def test_what_a_few_drafts_take_says_nothing_of_many():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable({32: costs_of(verify=[(1, 0.010), (8, 0.011)], draft=[(1, 0.001), (6, 0.001)])}))
    own.pause(32)
    for _ in range(100):
        own.record_request(4, 32, 0.1)
        own.record_draft(FLAT, 4, 32, 0.1)
    for _ in range(4):
        own.record(1, 1)
    assert own.plan(32, 32) is not None


def test_asks_for_single_sequences_are_not_what_each_of_many_costs():
    """They are as frequent as those for all the others, for somebody always has just begun."""
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable({32: costs_of(verify=[(1, 0.020), (8, 0.030)], draft=[(1, 0.001), (6, 0.001)])}))
    for _ in range(50):
        own.record_request(1, 32, 0.003)
        own.record_request(31, 32, 0.006)
        own.record(6, 2)
    assert own.plan(32, 32) is not None
    for _ in range(50):
        own.record_request(31, 32, 0.060)
    assert own.plan(32, 32) is None
    assert own.plan(1, 1) is not None, "nor the other way round"


class Asked:
    """An engine that believes what it is told of costs (nothing, for drafts), and what its drafter was asked for."""

    def __init__(
        self,
        monkeypatch,
        tmp_path,
        variant: str = "moa-0",
        num_rows: int = 1,
        num_micro_batches: int = 1,
        num_tokens: int = 60,
    ) -> None:
        tiny = load_target(tmp_path)
        self.source = LocalDrafts(build(tiny, VARIANTS[variant]), 320, 64)
        config = EngineConfig(kv_cache_tokens=8192, tree=SHAPE, num_micro_batches=num_micro_batches)
        self.engine = Engine(tiny.target, config, (), drafts={"d": self.source})
        self.controller = self.engine.draft_schedulers["d"].controller
        self.controller.set_costs(CostTable({1: costs_of(verify=[(1, 1.0), (8, 1.0)], draft=[(1, 1e-9), (6, 1e-9)])}))
        for name in ("record_pass", "record_rest", "record_request"):  # whatever this machine takes
            monkeypatch.setattr(self.controller, name, lambda *_: None)
        monkeypatch.setattr(self.controller._costs._draft, "record", lambda *_: None)
        monkeypatch.setattr(self.controller._costs._draft_scale[0], "lower", lambda *_: False)
        for number in range(num_rows):
            self.engine.submit(
                Request(prompt=tuple(tiny.prompt(number, length=40)), params=GREEDY, max_new_tokens=num_tokens)
            )
        self.asks: list[list[tuple[int, int]]] = []
        """Of each time: sequences and depths."""
        submit = self.source.submit
        monkeypatch.setattr(self.source, "submit", lambda jobs: (self._note(jobs), submit(jobs))[1])

    def _note(self, jobs: Sequence[DraftJob]) -> None:
        self.asks.append([(job.number, job.shape.depth) for job in jobs])

    def run(self, num_steps: int = 500) -> int:
        """Steps until something has been asked for, at most so many."""
        for step in range(num_steps):
            if self.asks or not self.engine.is_busy:
                return step
            self.engine.step()
        return num_steps


def collected(monkeypatch, asked: Asked) -> list[list[int]]:
    """To be filled with the sequences whose drafts are collected, time by time."""
    found: list[list[int]] = []
    collect = asked.source.collect
    monkeypatch.setattr(asked.source, "collect", lambda numbers: (found.append([*numbers]), collect(numbers))[1])
    return found


def without_ideas(monkeypatch, asked: Asked) -> None:
    """From now on the drafter answers with roots alone."""
    collect = asked.source.collect

    def roots(numbers: Sequence[int]) -> dict[int, TokenTree]:
        return {number: root_alone(tree.tokens[:1]) for number, tree in collect(numbers).items()}

    monkeypatch.setattr(asked.source, "collect", roots)


def test_an_engine_tries_for_a_few_sequences_alone(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path, num_rows=10)
    asked.controller.pause(10)
    found = collected(monkeypatch, asked)
    asked.run()
    assert sum(map(len, asked.asks)) >= 4
    assert len(found[0]) == 4, "however often it is asked in a cycle"


def test_it_is_tried_for_those_who_have_a_drafter(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path, num_rows=10)
    asked.controller.pause(10)
    monkeypatch.setattr(asked.source, "can_draft", lambda number: number >= 7)
    asked.run()
    assert asked.asks
    assert [number for number, _ in asked.asks[0]][:3] == [7, 8, 9]


def test_nobody_looks_for_a_drafter_while_it_is_tried(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path, num_rows=10)
    asked.controller.pause(10)
    opened: list[int] = []
    monkeypatch.setattr(asked.source, "open", opened.append)
    monkeypatch.setattr(asked.source, "can_draft", lambda number: False)
    asked.run(8)
    assert len(set(opened)) == 4


def test_late_drafts_end_a_try(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path, num_rows=4)
    asked.controller.set_costs(CostTable({1: costs_of(verify=[(1, 1.0), (8, 1.5)], draft=[(1, 0.5), (6, 0.5)])}))
    asked.controller.pause(10)
    monkeypatch.setattr(asked.source, "collect", lambda numbers: {})
    for _ in range(20):
        asked.engine.step()
    assert 4 <= sum(map(len, asked.asks)) <= 8, "it did not answer, and was not asked again"


def test_who_has_no_drafter_yet_has_not_given_up(monkeypatch, tmp_path):
    """Drafts are wanted, and the first ones are as deep as ever: places at drafters are found while cycles pass."""
    asked = Asked(monkeypatch, tmp_path)
    asked.run()
    asked.asks.clear()
    with monkeypatch.context() as patch:
        patch.setattr(asked.source, "can_draft", lambda number: False)
        for _ in range(8):
            asked.engine.step()
        asked.asks.clear()
    asked.run()
    assert asked.asks[0] == [(0, 6)]


def test_a_few_who_have_a_drafter_do_not_make_the_pass_deeper_for_all(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path, num_rows=16)
    asked.controller.set_costs(CostTable({16: costs_of(verify=[(1, 1.0), (8, 1.5)], draft=[(1, 0.01), (6, 0.01)])}))
    with monkeypatch.context() as patch:
        patch.setattr(asked.source, "can_draft", lambda number: number == 3)
        asked.run(12)
        assert not asked.asks
        assert not asked.controller.is_in_trial, "drafts are wanted all the same"
    asked.run()
    assert len(asked.asks[0]) == 16


def test_what_does_not_pay_for_a_few_is_not_believed_for_ever(monkeypatch, tmp_path):
    """A pool may be small for long: until those who have a place pay again, what is believed of them fades."""
    asked = Asked(monkeypatch, tmp_path, num_rows=16, num_tokens=200)
    asked.controller.set_costs(
        CostTable({16: costs_of(verify=[(1, 1.0), (2, 1.3), (8, 1.4)], draft=[(1, 0.01), (6, 0.01)])})
    )
    for _ in range(50):
        asked.controller.record(6, 1)
    monkeypatch.setattr(asked.source, "can_draft", lambda number: number < 4)
    assert asked.controller.plan(16, 16) is not None
    assert asked.controller.plan(16, 4) is None
    assert 4 < asked.run(190) < 190


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_an_engine_gives_up_and_tries_again(monkeypatch, tmp_path, num_micro_batches):
    asked = Asked(monkeypatch, tmp_path, num_rows=8, num_micro_batches=num_micro_batches, num_tokens=200)
    asked.controller.set_costs(CostTable({8: costs_of(verify=[(1, 1.0), (8, 1.5)], draft=[(1, 0.3), (6, 0.3)])}))
    without_ideas(monkeypatch, asked)
    by_step: dict[int, list[tuple[int, int]]] = {}
    for step in range(190 * num_micro_batches):
        asked.asks.clear()
        asked.engine.step()
        if asked.asks:
            by_step[step] = [each for asks in asked.asks for each in asks]
    pauses = {after: after - before for before, after in pairwise(by_step)}
    back = max(pauses, key=lambda step: pauses[step])
    assert pauses[back] > 10
    assert 0 < len(by_step[back]) <= 4
    assert {depth for _, depth in by_step[back]} == {1}


def test_one_half_that_does_without_drafts_does_not_give_up_for_the_other(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path, num_rows=8, num_micro_batches=2)
    plan = asked.controller.plan
    turns: list[int] = []
    forgotten: list[bool] = []
    monkeypatch.setattr(asked.controller, "pause", lambda: forgotten.append(True))
    asked.run()
    monkeypatch.setattr(
        asked.controller,
        "plan",
        lambda num_rows, count: (
            None if asked.engine._scheduler._is_second else (turns.append(count), plan(num_rows, count))[1]
        ),
    )
    for _ in range(8):
        asked.engine.step()
    assert turns
    assert not forgotten


def test_a_drafter_without_ideas_is_not_asked_for_ever(monkeypatch, tmp_path):
    """Where nothing matches, prompt lookup answers with the root alone: nothing is ever refused."""
    asked = Asked(monkeypatch, tmp_path, "ngram-0", num_rows=8)
    asked.controller.set_costs(CostTable({1: costs_of(verify=[(1, 1.0), (8, 1.5)], draft=[(1, 0.1), (6, 0.1)])}))
    without_ideas(monkeypatch, asked)
    num_steps = 0
    while asked.engine.is_busy:
        asked.engine.step()
        num_steps += 1
    assert 0 < len(asked.asks) < 0.5 * num_steps


def test_what_pays_again_is_soon_as_deep_as_it_was():
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable(COSTS))
    tries_of(own, 300, 8, 0)
    depths = tries_of(own, 2000, 8, 6)
    back = next(cycle for cycle, depth in enumerate(depths) if depth)
    assert depths[back : back + 5] == [1, 1, 2, 4, 6]
    assert set(depths[back + 5 :]) == {6}


def test_asking_has_its_price():
    """Of sixteen rows, telling their drafter what is new may take longer than what it drafts saves."""
    own = SpeculationController(SHAPE)
    own.set_costs(CostTable({16: costs_of(verify=[(1, 0.010), (8, 0.015)], draft=[(1, 0.001), (6, 0.001)])}))
    for _ in range(50):
        own.record(6, 1)
    assert own.plan(16, 16) is not None
    for _ in range(50):
        own.record_request(16, 16, 0.020)
    assert own.plan(16, 16) is None
    own.record_draft(DEEP, 16, 16, 0.001)
    for _ in range(300):
        own.pause(16)
    assert own.plan(16, 16) is not None, "it is not believed for ever"
    own.record_draft(FLAT, 16, 16, 0.001)
    for _ in range(50):
        own.record(6, 1)
    assert own.plan(16, 16) is not None
    own.record_request(16, 16, 0.020)
    assert own.plan(16, 16) is None, "but at once where it is as it was"


def test_telling_a_whole_prompt_is_no_reason_not_to_draft(monkeypatch, tmp_path):
    asked = Asked(monkeypatch, tmp_path)
    now, taken = [0.0], []
    monkeypatch.setattr("moray.decoding.engine.draft_scheduler.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(asked.controller, "record_request", lambda count, num_rows, seconds: taken.append(seconds))
    monkeypatch.setattr(asked.controller, "record_overhead", lambda _: None)  # see test_loss_budget for that
    extend = asked.source.extend

    def slow(number: int, tokens: torch.Tensor, memory: Memory, num_kept: int) -> None:
        now[0] += tokens.shape[0]
        extend(number, tokens, memory, num_kept)

    monkeypatch.setattr(asked.source, "extend", slow)
    while asked.engine.is_busy:
        asked.engine.step()
    assert now[0] > 40 + 16, "the prompt was told"
    assert len(taken) == len(asked.asks) - 1
    assert 0 < max(taken) <= 7, "seconds: a tree's path and its root"


@pytest.mark.parametrize("is_exact", [True, False])
def test_drafts_of_a_gpu_that_nobody_waits_for_teach_nothing_of_costs(monkeypatch, tmp_path, is_exact):
    """Their time is that of starting them: believed, it would make drafts look cheap for good."""
    monkeypatch.setattr(Engine, "has_exact_phases", is_exact)
    asked, seconds, told = Asked(monkeypatch, tmp_path, num_rows=2, num_tokens=12), [], []
    monkeypatch.setattr(asked.controller, "record_draft", lambda *given: seconds.append(given[-1]))
    monkeypatch.setattr(asked.controller, "record_request", lambda *given: told.append(given[-1]))
    while asked.engine.is_busy:
        asked.engine.step()
    assert len(seconds) > 1
    assert all((one is not None) == is_exact for one in seconds[1:]), "the first is behind the prompts"
    assert bool(told) == is_exact
