"""How deep to draft: the choice equals brute force over its formula, follows acceptance, and never takes a loss."""

import math
import random
from itertools import pairwise

import pytest

from moray.decoding.planning.controller import DraftPlan, SpeculationController
from moray.decoding.planning.costs import Costs, CostTable, ascending, growing_sizes
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape

CHAIN = AdaptiveShape(type="adaptive", depth=8)
TREE = AdaptiveShape(type="adaptive", depth=6, breadth=4, nodes=40)
FOUR_LEVELS = DraftPlan(TREE.at(4))


def costs_of(verify: list[tuple[int, float]], draft: list[tuple[int, float]]) -> Costs:
    """Costs of a drafter without a choice of N."""
    return Costs(verify, {0: draft})


CHEAP = costs_of(verify=[(1, 1.0), (64, 1.3)], draft=[(1, 0.05), (8, 0.4)])
DEAR = costs_of(verify=[(1, 1.0), (2, 1.9), (64, 40.0)], draft=[(1, 0.9), (8, 7.2)])
DECAY, PRIOR_RATE, PRIOR_WEIGHT, MIN_GAIN = 0.97, 0.7, 6.0, 1.02
NODE_PRIOR_WEIGHT = 2.0


def controller(shape: AdaptiveShape, costs: Costs) -> SpeculationController:
    """Of one sequence."""
    made = SpeculationController(shape, list(costs.draft))
    made.set_costs(CostTable({1: costs}))
    return made


def depth_of(plan: DraftPlan | None) -> int:
    return plan.shape.depth if plan else 0


def end_cycle(
    own: SpeculationController, plan: DraftPlan | None, accepted: int, true: Costs | None = None, factor: float = 1.0
) -> None:
    """A cycle has drafted this, and so many were accepted; timed by `true` costs, if there are any."""
    depth = depth_of(plan)
    if true is not None:
        own.record_pass(1, depth, factor * true.verify_seconds(depth + 1))
    if plan is None:
        own.pause(1)
        return
    seconds = None if true is None else factor * true.draft_seconds(depth, plan.num_target_layers)
    own.record_draft(plan, 1, 1, seconds)
    own.record(depth, min(depth, accepted), plan.num_target_layers)


def live(own: SpeculationController, accept: list[int], cycles: int) -> list[int]:
    """Levels drafted in each of some cycles; `accept` is how many the target would take, cycle after cycle."""
    drafted = []
    for cycle in range(cycles):
        plan = own.plan(1, 1)
        drafted.append(depth_of(plan))
        end_cycle(own, plan, accept[cycle % len(accept)])
    return drafted


# --- Costs ---


def test_costs_lie_on_lines_between_what_was_measured():
    costs = costs_of(verify=[(1, 1.0), (3, 2.0), (8, 7.0)], draft=[(1, 0.5), (4, 0.8)])
    assert [costs.verify_seconds(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 7.0])
    assert costs.verify_seconds(9) == 7.0, "what lies outside is as at the end"
    assert [costs.draft_seconds(n, 0) for n in (0, 1, 2, 4)] == pytest.approx([0.0, 0.5, 0.6, 0.8])
    assert costs_of([(1, 2.0)], [(1, 0.1)]).verify_seconds(1) == 2.0


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 3, 4, 5]),
        (13, [1, 2, 3, 4, 6, 8, 12, 13]),
        (24, [1, 2, 3, 4, 6, 8, 12, 16, 24]),
    ],
)
def test_costs_are_measured_at_growing_sizes(most, sizes):
    assert growing_sizes(most) == sizes


def test_more_work_never_takes_less_time():
    assert ascending([1, 2, 3], [2.0, 1.0, 7.0]) == [(1, 1.0), (2, 1.0), (3, 7.0)], "two tokens bound what one takes"


# --- Costs of real cycles ---


def settled(costs: Costs, true: Costs | None, hiccup: int = -1) -> list[int]:
    """Depths while half of all drafts are refused; cycles are timed by `true` costs, if there are any."""
    own, depths = controller(CHAIN, costs), []
    for cycle in range(200):
        plan = own.plan(1, 1)
        end_cycle(own, plan, (1, 3, 0, 2)[cycle % 4], true, 1000.0 if cycle == hiccup else 1.0)
        depths.append(depth_of(plan))
    return depths[100:]


def mean(depths: list[int]) -> float:
    return sum(depths) / len(depths)


def test_costs_that_cycles_do_not_bear_out_are_corrected():
    true = costs_of([(1, 1.0), (9, 1.4)], [(1, 0.2), (8, 1.6)])
    right = mean(settled(true, None))
    for factor in (0.1, 2.4):
        wrong = costs_of(true.verify, [(levels, factor * seconds) for levels, seconds in true.draft[0]])
        assert abs(mean(settled(wrong, None)) - right) > 0.5
        assert abs(mean(settled(wrong, true)) - right) < 0.3


def test_a_machine_that_has_become_slower_at_everything_drafts_as_deep_as_before():
    slow = costs_of([(size, 7 * seconds) for size, seconds in CHEAP.verify], [(n, 7 * s) for n, s in CHEAP.draft[0]])
    assert abs(mean(settled(CHEAP, slow)) - mean(settled(CHEAP, None))) < 0.5


def test_drafting_that_became_too_dear_is_tried_again():
    """Three times slower for a while, which ends drafting; the machine recovers, and so does drafting."""
    measured = costs_of([(1, 10.0), (9, 10.4)], [(1, 4.0), (8, 32.0)])
    slow = costs_of(measured.verify, [(levels, 3 * seconds) for levels, seconds in measured.draft[0]])
    own, depths = controller(CHAIN, measured), []
    for cycle in range(400):
        plan = own.plan(1, 1)
        end_cycle(own, plan, (1, 1, 0, 1, 1, 0, 1, 1, 1, 0)[cycle % 10], slow if cycle < 40 else measured)
        depths.append(depth_of(plan))
    assert depths[0] == 1
    assert depths[20:40].count(0) > 10, "given up"
    assert sum(depths[-100:]) > 20, "and back"


def test_a_factor_learnt_at_one_size_holds_at_all():
    costs = costs_of([(1, 1.0), (9, 1.0)], [(1, 0.1), (8, 0.8)])
    own = controller(CHAIN, costs)
    for _ in range(200):
        plan = own.plan(1, 1)
        own.record_pass(1, depth_of(plan), 3.0)
        own.record_draft(plan, 1, 1, 3.0 * costs.draft_seconds(depth_of(plan), 0))
    slow = costs_of([(1, 3.0), (9, 3.0)], [(1, 0.3), (8, 2.4)])
    for depth in (1, 8):
        wanted = slow.verify_seconds(depth + 1) + slow.draft_seconds(depth, 0)
        assert own._costs.cycle_seconds(1, 1, depth, depth, 0) == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("slower", [(1, 2, 1), (1, 1, 3), (3, 3, 3), (1, 8, 8)], ids=str)
def test_costs_measured_beside_other_work_do_not_end_drafting(slower):
    """`slower`: how much longer a pass over the root, over a tree, and a draft were measured to take than they do."""
    true = costs_of([(1, 1.0), (2, 1.05), (9, 1.2)], [(1, 0.1), (8, 0.7)])
    root, tree, draft = slower
    measured = costs_of(
        [(size, seconds * (tree if size > 1 else root)) for size, seconds in true.verify],
        [(levels, draft * seconds) for levels, seconds in true.draft[0]],
    )
    own, depths = controller(CHAIN, measured), []
    for cycle in range(200):
        plan = own.plan(1, 1)
        end_cycle(own, plan, (1, 3, 0, 2)[cycle % 4], true)
        depths.append(depth_of(plan))
    assert depths[100:].count(0) < 10
    assert abs(mean(depths[100:]) - mean(settled(true, None))) < 0.7


def test_what_every_cycle_does_besides_makes_longer_drafts_worth_while():
    """A cycle that costs more anyway should bring more: 0.7 accepted, pass 1, draft 0.2 a level, and then the rest."""
    costs = costs_of([(1, 1.0), (9, 1.4)], [(1, 0.2), (8, 1.6)])
    depths = []
    for rest in (0.0, 1.0, 3.0):
        own = controller(CHAIN, costs)
        for _ in range(100):
            own.record_pass(1, 0, costs.verify_seconds(1))
            own.record_rest(1, rest)
        depths.append(depth_of(own.plan(1, 1)))
    rates = [PRIOR_RATE] * 8

    def best(rest: float) -> int:
        return best_chain(rates, costs_of([(n, s + rest) for n, s in costs.verify], costs.draft[0]))

    assert depths == [best(0.0), best(1.0), best(3.0)]
    assert depths[0] < depths[1] < depths[2]


def test_one_cycle_of_a_thousand_times_the_seconds_changes_little():
    calm, disturbed = settled(CHEAP, CHEAP), settled(CHEAP, CHEAP, hiccup=100)
    assert all(abs(one - other) <= 1 for one, other in zip(calm, disturbed, strict=True))


# --- Depth ---


def test_deep_where_drafts_are_accepted_and_cheap():
    assert live(controller(CHAIN, CHEAP), [8], 30)[-1] == 8


def test_shallow_where_drafts_are_refused():
    drafted = live(controller(CHAIN, CHEAP), [1], 60)
    assert drafted[-1] <= 2 < drafted[0]


def test_shallow_where_drafting_is_dear():
    costs = costs_of(verify=[(1, 1.0), (9, 1.2)], draft=[(1, 0.5), (8, 4.0)])
    assert live(controller(CHAIN, costs), [8], 60)[-1] > live(controller(CHAIN, costs), [2], 60)[-1] > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_no_draft_where_it_is_a_loss(shape):
    own = controller(shape, DEAR)
    drafted = live(own, [8], 1000)
    assert set(drafted) == {0, 1}
    assert drafted.index(1) > 30, "whether it is as dear as it was measured to be"
    assert sum(drafted) < 7


def test_no_draft_after_refusals_until_they_are_forgotten():
    """Worth it at the prior's 70 %, not at 0 %: given up after refusals, tried again after a while, then kept."""
    own = controller(AdaptiveShape(type="adaptive", depth=1), costs_of([(1, 1.0), (2, 1.2)], [(1, 0.2)]))
    refused = live(own, [0], 200)
    assert refused[0] == 1, "tried"
    first_pause = refused.index(0)
    assert 1 in refused[first_pause:], "tried again"
    assert refused.count(0) > 3 * refused.count(1), "seldom"
    accepted = live(own, [1], 200)
    assert accepted[-50:] == [1] * 50, "back for good"


def test_a_useless_drafter_is_rarely_tried_and_one_that_improves_is_used_again():
    """A refused draft costs time. This controller is told of no cycles, so its budget of losses limits nothing."""
    costs = costs_of([(1, 1.0), (2, 1.1), (9, 1.5)], [(1, 0.1), (8, 0.8)])
    own = controller(CHAIN, costs)
    refused = [min(depth, 1) for depth in live(own, [0], 1500)]
    assert sum(refused[-1000:]) <= 40, "4 % of the cycles"
    assert sum(refused[-1000:]) >= 3, "never again would be for good"
    accepted = live(own, [8], 400)
    assert min(accepted[-50:]) > 0, "back for good"


def expected_rates(history: list[tuple[int, int]], depth: int) -> list[float]:
    """Acceptance by level, summed up from all cycles at once: age weights, then shrinking to the level before."""
    rates, belief = [], PRIOR_RATE
    for level in range(depth):
        weights = [DECAY**age for age in range(len(history) - 1, -1, -1)]
        reached = [
            w for w, (drafted, accepted) in zip(weights, history, strict=True) if level < drafted and level <= accepted
        ]
        passed = [
            w for w, (drafted, accepted) in zip(weights, history, strict=True) if level < drafted and level < accepted
        ]
        belief = (sum(passed) + PRIOR_WEIGHT * belief) / (sum(reached) + PRIOR_WEIGHT)
        rates.append(belief)
    return rates


def best_chain(rates: list[float], costs: Costs) -> int:
    """The depth of most tokens per second by brute force; 0 where none gains more than costs are known to."""

    def rate(depth: int) -> float:
        expected = sum(math.prod(rates[:level]) for level in range(depth + 1))
        return expected / (costs.verify_seconds(depth + 1) + costs.draft_seconds(depth, 0))

    best = max(range(1, len(rates) + 1), key=rate)
    return best if rate(best) > MIN_GAIN * rate(0) else 0


@pytest.mark.parametrize("seed", range(8))
def test_the_depth_is_the_best_by_brute_force(seed):
    """Random costs and histories, in which many drafts were cut short."""
    generator = random.Random(seed)
    chosen = set()
    for _ in range(30):
        verify, draft = 1.0, 0.0
        costs = costs_of(
            [(n, verify := verify + generator.random() * 0.3) for n in (1, 2, 3, 4, 6, 8, 9)],
            [(n, draft := draft + generator.random() * 0.3) for n in (1, 2, 3, 4, 6, 8)],
        )
        own = controller(CHAIN, costs)
        history = []
        for _ in range(generator.randrange(40)):
            drafted = 1 + generator.randrange(8)  # without pauses, whose cycles count for less
            history.append((drafted, min(drafted, int(generator.expovariate(0.3)))))
            own.record(*history[-1])
        plan = own.plan(1, 1)
        best = best_chain(expected_rates(history, 8), costs)
        assert plan == (DraftPlan(ChainShape(type="chain", depth=best)) if best else None)
        chosen.add(best)
    assert len(chosen) >= 3, "one answer to every question proves nothing"


def test_drafts_cut_short_say_nothing_about_the_levels_they_never_had():
    """All of two levels accepted, again and again: the third is believed to be as good, not refused."""
    cut, refused = controller(CHAIN, CHEAP), controller(CHAIN, CHEAP)
    for _ in range(60):
        cut.record(2, 2)
        refused.record(3, 2)
    assert depth_of(cut.plan(1, 1)) == 8
    assert depth_of(refused.plan(1, 1)) in (2, 3), "drafts are cheap here, and refusals may be bad luck"


def test_cycles_without_a_draft_are_no_refusals():
    own, other = controller(CHAIN, CHEAP), controller(CHAIN, CHEAP)
    for _ in range(500):
        own.decay(1)
        own.record_empty()
    for _ in range(500):
        own.record(0, 0)
    assert own.plan(1, 1) == other.plan(1, 1)


# --- Nodes ---


def best_budget(log_probs: list[float], trust: float, costs: Costs, depth: int) -> int:
    def rate(count: int) -> float:
        expected = 1.0 + trust * sum(map(math.exp, log_probs[:count]))
        return expected / (costs.verify_seconds(count + 1) + costs.draft_seconds(depth, 0))

    return max(range(1, len(log_probs) + 1), key=rate)


def log_probs_of(seed: int, count: int = 40) -> list[float]:
    generator = random.Random(seed)
    return sorted((-generator.expovariate(0.6) for _ in range(count)), reverse=True)


def after_cycles(costs: Costs, accepted: int, cycles: int) -> tuple[SpeculationController, float]:
    """A controller that has seen that many accepted in every cycle, and its trust, summed up apart."""
    own, promised, kept = controller(TREE, costs), 0.0, 0.0
    log_probs = [math.log(0.5)] * 3
    for _ in range(cycles):
        count = own.nodes_worth_verifying(FOUR_LEVELS, [log_probs], 1)
        own.record(4, accepted, 0, count, 0.5 * count)
        promised, kept = promised * DECAY + 0.5 * count, kept * DECAY + accepted
    return own, (kept + NODE_PRIOR_WEIGHT) / (promised + NODE_PRIOR_WEIGHT)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_budget_is_the_best_by_brute_force(accepted):
    costs = costs_of([(1, 1.0), (4, 1.1), (16, 2.0), (41, 6.0)], [(1, 0.05), (6, 0.3)])
    budgets = set()
    for seed in range(20):
        own, trust = after_cycles(costs, accepted, 12)
        budget = own.nodes_worth_verifying(FOUR_LEVELS, [log_probs_of(seed)], 1)
        budgets.add(budget)
        assert budget == best_budget(log_probs_of(seed), trust, costs, 4)
    assert len(budgets) >= 3


def test_trees_of_one_pass_share_their_number_of_nodes():
    """By brute force: a pass takes as long as if all of its trees were as large as the largest."""
    costs = {1: costs_of([(1, 1.0), (41, 3.0)], [(1, 0.05), (6, 0.3)]), 8: costs_of([(1, 2.0), (41, 20.0)], [(1, 0.1)])}
    own = SpeculationController(TREE)
    own.set_costs(CostTable(costs))
    trees = [log_probs_of(seed, count) for seed, count in enumerate((40, 3, 17, 0))]

    def rate(count: int) -> float:
        seconds = own._costs.table.verify_seconds(6, count + 1) + own._costs.table.draft_seconds(4, 4, 0)
        return (6 + sum(math.exp(p) for tree in trees for p in tree[:count])) / seconds

    best = own.nodes_worth_verifying(FOUR_LEVELS, trees, 6)
    assert best == max(range(1, 41), key=rate)
    assert 1 < best < own.nodes_worth_verifying(FOUR_LEVELS, trees[:1], 1), "in a larger batch fewer nodes are worth it"


def test_the_budget_grows_with_trust():
    costs = costs_of([(1, 1.0), (41, 6.0)], [(1, 0.05), (6, 0.3)])
    budgets = []
    for accepted in (0, 1, 3):
        own, _ = after_cycles(costs, accepted, 40)
        budgets.append([own.nodes_worth_verifying(FOUR_LEVELS, [log_probs_of(seed)], 1) for seed in range(10)])
    for less, more in pairwise(budgets):
        assert all(a <= b for a, b in zip(less, more, strict=True))
        assert sum(less) < sum(more)


def test_a_budget_is_at_least_one_node_and_at_most_those_there_are():
    own = controller(TREE, CHEAP)
    assert own.nodes_worth_verifying(FOUR_LEVELS, [[-50.0] * 7], 1) == 1
    assert own.nodes_worth_verifying(FOUR_LEVELS, [[-math.inf] * 7], 1) == 1
    assert own.nodes_worth_verifying(FOUR_LEVELS, [[0.0] * 7], 1) == 7


def test_trees_are_priced_by_the_nodes_that_are_kept():
    """All nodes of a shape would be a loss, a few are a gain: so there is a draft, as deep as a chain's at first."""
    costs = costs_of([(1, 1.0), (41, 7.0)], [(1, 0.05), (6, 0.3)])
    assert TREE.at(1).num_nodes == 4
    assert 4 / (costs.verify_seconds(5) + costs.draft_seconds(1, 0)) > 1
    assert 7 / (costs.verify_seconds(41) + costs.draft_seconds(6, 0)) < 1
    tree, chain = controller(TREE, costs), controller(AdaptiveShape(type="adaptive", depth=6), costs)
    first = tree.plan(1, 1)
    assert first is not None
    assert isinstance(first.shape, DynamicShape)
    assert first.shape.depth == depth_of(chain.plan(1, 1)) > 0
    sure = [math.log(0.95) * (1 + node) for node in range(6)] + [-9.0] * 34
    for _ in range(40):
        plan = tree.plan(1, 1)
        assert plan is not None
        depth, offered = plan.shape.depth, sure[: plan.shape.num_nodes]
        count = tree.nodes_worth_verifying(plan, [offered], 1)
        assert count <= 6
        tree.record(depth, depth, 0, count, sum(map(math.exp, offered[:count])))
    assert depth_of(tree.plan(1, 1)) >= 5, "deep where the few nodes kept are accepted"


def test_many_nodes_kept_make_depth_dear():
    """The same acceptance with more nodes verified for it: a shallower tree."""
    costs = costs_of([(1, 1.0), (41, 4.0)], [(1, 0.05), (6, 0.3)])
    depths = []
    for flat in (False, True):
        own = controller(TREE, costs)
        for _ in range(60):
            count = 40 if flat else 4
            own.record(4, 3, 0, count, float(count))
        depths.append(depth_of(own.plan(1, 1)))
    assert depths[0] > depths[1]


# --- Values of N ---


def layer_counts_at(*per_level: float) -> Costs:
    """Costs of N = 0, 1, ... by what a level takes, of a pass of 1."""
    drafts = {
        num_target_layers: [(1, seconds), (8, 8 * seconds)] for num_target_layers, seconds in enumerate(per_level)
    }
    return Costs([(1, 1.0), (64, 1.3)], drafts)


def share_of(
    num_target_layers: int, own: SpeculationController, refusals: list[float], cycles: int = 300, seed: int = 0
) -> float:
    """Of all cycles, those that draft with this N, if so many of each one's levels are refused."""
    generator = random.Random(seed)
    used = 0
    for _ in range(cycles):
        plan = own.plan(1, 1)
        depth, accepted = depth_of(plan), 0
        while plan and accepted < depth and generator.random() > refusals[plan.num_target_layers]:
            accepted += 1
        used += plan is not None and plan.num_target_layers == num_target_layers
        end_cycle(own, plan, accepted)
    return used / cycles


CHAINS = [CHAIN, AdaptiveShape(type="adaptive", depth=5)]


@pytest.mark.parametrize("shape", CHAINS, ids=lambda shape: shape.name)
def test_the_n_of_most_tokens_per_second_is_found(shape):
    equal = [0.2, 0.19, 0.18]
    assert share_of(0, controller(shape, layer_counts_at(0.05, 0.15, 0.3)), equal) > 0.9, "dearer for nothing"
    better = [0.35, 0.2, 0.05]
    assert share_of(2, controller(shape, layer_counts_at(0.05, 0.06, 0.07)), better) > 0.75, "better for little"
    assert share_of(1, controller(shape, layer_counts_at(0.05, 0.06, 0.4)), [0.4, 0.1, 0.09]) > 0.75, "the one between"


@pytest.mark.parametrize("shape", CHAINS, ids=lambda shape: shape.name)
def test_an_n_that_has_become_better_is_found_again(shape):
    own = controller(shape, layer_counts_at(0.05, 0.07))
    assert share_of(0, own, [0.1, 0.4]) > 0.8
    share_of(1, own, [0.5, 0.1], cycles=150, seed=1)
    assert share_of(1, own, [0.5, 0.1], cycles=100, seed=2) > 0.5


def test_of_several_values_of_n_none_is_drafted_with_where_all_are_a_loss():
    assert controller(CHAIN, layer_counts_at(3.0, 4.0)).plan(1, 1) is None


def test_a_large_batch_drafts_with_the_cheaper_n():
    """N = 1 is accepted more often; of many sequences its drafts take longer than what they save."""
    own = SpeculationController(CHAIN, [0, 1])
    verify = [(1, 1.0), (9, 1.3)]
    few, many = (
        {0: [(1, 0.05), (8, 0.4)], 1: [(1, 0.06), (8, 0.5)]},
        {0: [(1, 0.1), (8, 0.8)], 1: [(1, 2.0), (8, 16.0)]},
    )
    own.set_costs(CostTable({1: Costs(verify, few), 32: Costs(verify, many)}))
    for _ in range(100):
        own.record(8, 3, 0)
        own.record(8, 7, 1)
    plans = [own.plan(rows, rows) for rows in (1, 32)]
    assert [plan.num_target_layers for plan in plans if plan] == [1, 0]


def test_the_same_past_gives_the_same_choice():
    def choices() -> list[tuple[int, int]]:
        own, made = controller(CHAIN, layer_counts_at(0.05, 0.08, 0.1)), []
        for cycle in range(100):
            plan = own.plan(1, 1)
            true = Costs([(1, 1.0 + 0.01 * (cycle % 7))], {n: [(1, 0.06), (8, 0.48)] for n in range(3)})
            end_cycle(own, plan, cycle * 7 % 5, true)
            made.append((plan.num_target_layers if plan else -1, depth_of(plan)))
        return made

    assert choices() == choices()
    assert len({num_target_layers for num_target_layers, _ in choices()}) >= 2


def test_an_n_that_takes_longer_than_was_measured_is_corrected_alone():
    """N = 1 really takes thrice as long; N = 0 is believed to take what it takes."""
    own, depth = controller(AdaptiveShape(type="adaptive", depth=5), layer_counts_at(0.1, 0.1)), 5
    for cycle in range(120):
        plan = DraftPlan(ChainShape(type="chain", depth=depth), cycle % 2)  # both in turn
        own.record_pass(1, depth, 1.02)
        own.record_draft(plan, 1, 1, (0.5, 1.5)[plan.num_target_layers])
    taken = [
        own._costs.cycle_seconds(1, 1, depth, depth, num_target_layers)
        - own._costs.cycle_seconds(1, 0, depth, 0, num_target_layers)
        for num_target_layers in (0, 1)
    ]
    assert taken == pytest.approx([0.5, 1.5], rel=0.3)


def test_asking_whether_drafts_pay_uses_up_no_trial():
    drafted: dict[bool, list[int]] = {False: [], True: []}
    for is_asked, depths in drafted.items():
        own = controller(CHAIN, DEAR)
        for _ in range(300):
            if is_asked:
                own.pays(1)
            plan = own.plan(1, 1)
            depths.append(depth_of(plan))
            end_cycle(own, plan, 0)
        assert not own.pays(1)
    assert drafted[True] == drafted[False]
    assert sum(depth > 0 for depth in drafted[True][50:]) > 0, "it is tried again now and then"


def test_one_slow_request_does_not_end_drafting():
    """A first request of three plain passes counts as one draft step; slow ones that follow still end drafting."""
    own = controller(CHAIN, costs_of(verify=[(1, 0.040), (8, 0.044)], draft=[(1, 0.005), (8, 0.020)]))
    own.record(3, 2)
    own.record_request(1, 1, 0.120)
    assert own.plan(1, 1) is not None
    for _ in range(30):
        own.record_request(1, 1, 0.120)
    assert own.plan(1, 1) is None, "requests that are always slow do"
