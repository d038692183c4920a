"""What drafting may lose, and when it may go on."""

import pytest

from moray.decoding.planning.controller import SpeculationController
from moray.decoding.planning.costs import CostTable
from moray.decoding.planning.loss_budget import LossBudget
from moray.trees.shapes import AdaptiveShape
from tests.unit.decoding.planning.test_controller_of_many import costs_of


def test_a_budget_loses_one_percent_in_the_long_run():
    """Whoever spends as soon as it may, a whole pass at a time and without any gain."""
    budget, spent, num_cycles = LossBudget(), 0.0, 50_000
    for _ in range(num_cycles):
        if not budget.is_spent:
            budget.spend(1.0)
            spent += 1.0
        budget.record_cycle()
    assert 0.004 * num_cycles < spent < 0.01 * num_cycles


def test_what_pays_is_never_stopped():
    budget = LossBudget()
    for cycle in range(2_000):
        budget.spend(1.5)
        budget.save(1.6)
        budget.record_cycle()
        assert not budget.is_spent, cycle


def test_a_good_time_does_not_pay_for_a_bad_one():
    budget = LossBudget()
    for _ in range(2_000):
        budget.save(0.8)
        budget.record_cycle()
    count = 0
    while not budget.is_spent:
        budget.spend(0.5)
        budget.record_cycle()
        count += 1
    assert count < 70


def test_one_disturbed_cycle_is_not_the_end():
    budget = LossBudget()
    budget.spend(1_000.0)
    assert not budget.is_spent


@pytest.mark.parametrize(("overhead", "goes_on"), [(0.0, True), (1.0, False)])
def test_time_that_the_costs_do_not_show_ends_drafting(overhead, goes_on):
    """Every level is accepted, so drafting promises to pay; sending tokens to the drafter takes all of it."""
    own = SpeculationController(AdaptiveShape(type="adaptive", depth=1))
    own.set_costs(CostTable({1: costs_of([(1, 1.0), (2, 1.5)], [(1, 0.1)])}))
    drafted = []
    for _ in range(60):
        plan = own.plan(1, 1)
        drafted.append(plan is not None)
        if plan is not None:
            own.record_overhead(0.1 + overhead)
            own.record(1, 1)
        else:
            own.pause(1)
        own.record_pass(1, int(plan is not None), 1.5 if plan is not None else 1.0)
        own.record_cycle(1, int(plan is not None), 1.0 if plan is not None else 0.0)
    assert all(drafted) == goes_on
    assert sum(drafted) > 5


def test_a_pass_over_trees_is_never_booked_as_shorter_than_a_plain_one():
    """Costs that were measured beside other work, of which only those of trees were lowered since."""
    own = SpeculationController(AdaptiveShape(type="adaptive", depth=1))
    own.set_costs(CostTable({1: costs_of([(1, 1.0), (2, 1.1)], [(1, 0.1)])}))
    for _ in range(20):
        own.record_pass(1, 1, 0.1)
    assert own._costs.plain_passes(1, 1) == 1.0


def test_each_drafter_pays_for_its_own_trees_alone():
    """Its share of the drafts, and the size of its own largest tree, whatever the others verify."""
    own = SpeculationController(AdaptiveShape(type="adaptive", depth=1))
    own.set_costs(CostTable({4: costs_of([(1, 1.0), (2, 1.5), (9, 5.0)], [(1, 0.1)])}))
    spent = []
    own._budget.spend = spent.append
    own.record_cycle(4, 1, 0.5)
    own.record_cycle(4, 0, 0.0)
    assert spent == pytest.approx([0.25, 0.0])
