"""How deep to draft: the choice equals brute force over its formula, follows acceptance, and never takes a loss."""

import math
import random
from itertools import pairwise

import pytest

from moray.decoding.adapt import DraftPlanner
from moray.decoding.costs import Costs, growing_sizes, measure_costs
from moray.trees.shapes import AdaptiveShape, ChainShape, DynamicShape

CHAIN = AdaptiveShape(type="adaptive", depth=8)
TREE = AdaptiveShape(type="adaptive", depth=6, breadth=4, nodes=40)
CHEAP = Costs(verify=[(1, 1.0), (64, 1.3)], draft=[(1, 0.05), (8, 0.4)])
DEAR = Costs(verify=[(1, 1.0), (2, 1.9), (64, 40.0)], draft=[(1, 0.9), (8, 7.2)])
FORGET, PRIOR_RATE, PRIOR_WEIGHT = 0.97, 0.7, 2.0


def live(adapter: DraftPlanner, accept: list[int], cycles: int) -> list[int]:
    """Levels drafted in each of some cycles; `accept` is how many the target would take, cycle after cycle."""
    drafted = []
    for cycle in range(cycles):
        shape = adapter.next_shape()
        drafted.append(shape.depth if shape else 0)
        adapter.record(drafted[-1], min(drafted[-1], accept[cycle % len(accept)]))
    return drafted


# --- Costs ---


def test_costs_lie_on_lines_between_what_was_measured():
    costs = Costs(verify=[(1, 1.0), (3, 2.0), (8, 7.0)], draft=[(1, 0.5), (4, 0.8)])
    assert [costs.verify_seconds(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 7.0])
    assert costs.verify_seconds(9) == 7.0, "what lies outside is as at the end"
    assert [costs.draft_seconds(n) for n in (0, 1, 2, 4)] == pytest.approx([0.0, 0.5, 0.6, 0.8])
    assert Costs([(1, 2.0)], [(1, 0.1)]).verify_seconds(1) == 2.0


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
    ran: dict[str, list[int]] = {"verify": [], "draft": []}
    wanted = growing_sizes(most), growing_sizes(3)
    costs = measure_costs(ran["verify"].append, {0: ran["draft"].append}, wanted, clock=lambda: 0.0)[0]
    assert [size for size, _ in costs.verify] == sizes
    assert [size for size, _ in costs.draft] == [1, 2, 3]
    assert ran["verify"] == sizes * 6, "once untimed, five times timed, in turn"


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_costs_are_the_fastest_runs_but_the_first_and_never_fall():
    clock = Clock()
    scripts = {
        1: [0.5, 2.0, 9.0, 2.5, 2.25, 3.0],
        2: [0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        3: [0.0, 7.0, 7.0, 9.0, 90.0, 7.5],
    }

    def verify(size: int) -> None:
        clock.now += scripts[size].pop(0)

    def draft(size: int) -> None:
        clock.now += size

    costs = measure_costs(verify, {0: draft}, ([1, 2, 3], [1, 2]), clock)[0]
    assert costs.verify == [(1, 1.0), (2, 1.0), (3, 7.0)], "what two tokens took bounds what one takes"
    assert costs.draft == [(1, 1.0), (2, 2.0)], "the floor of the passes is not that of the drafts"


# --- Costs of real cycles ---


def settled(costs: Costs, true: Costs | None, hiccup: int = -1) -> list[int]:
    """Depths while half of all drafts are refused; cycles are timed by `true` costs, if there are any."""
    planner = DraftPlanner(CHAIN, {0: costs})
    depths = []
    for cycle in range(200):
        shape = planner.next_shape()
        depth = shape.depth if shape else 0
        if true:
            factor = 1000.0 if cycle == hiccup else 1.0
            planner.record_seconds(depth, factor * true.verify_seconds(depth + 1), factor * true.draft_seconds(depth))
        planner.record(depth, min(depth, (1, 3, 0, 2)[cycle % 4]))
        depths.append(depth)
    return depths[100:]


def mean(depths: list[int]) -> float:
    return sum(depths) / len(depths)


def test_costs_that_cycles_do_not_bear_out_are_corrected():
    true = Costs([(1, 1.0), (9, 1.4)], [(1, 0.2), (8, 1.6)])
    right = mean(settled(true, None))
    for factor in (0.1, 1.8):
        wrong = Costs(true.verify, [(levels, factor * seconds) for levels, seconds in true.draft])
        assert abs(mean(settled(wrong, None)) - right) > 0.5
        assert abs(mean(settled(wrong, true)) - right) < 0.3


def test_a_machine_that_has_become_slower_at_everything_drafts_as_deep_as_before():
    slow = Costs([(size, 7 * seconds) for size, seconds in CHEAP.verify], [(n, 7 * s) for n, s in CHEAP.draft])
    assert abs(mean(settled(CHEAP, slow)) - mean(settled(CHEAP, None))) < 0.5


def test_drafting_that_became_too_dear_is_tried_again():
    """Three times slower for a while, which ends drafting; the machine recovers, and so does drafting."""
    measured = Costs([(1, 10.0), (9, 10.4)], [(1, 4.0), (8, 32.0)])
    planner, depths = DraftPlanner(CHAIN, {0: measured}), []
    for cycle in range(400):
        shape = planner.next_shape()
        depth = shape.depth if shape else 0
        factor = 3.0 if cycle < 40 else 1.0
        planner.record_seconds(depth, measured.verify_seconds(depth + 1), factor * measured.draft_seconds(depth))
        planner.record(depth, min(depth, (1, 1, 0, 1, 1, 0, 1, 1, 1, 0)[cycle % 10]))
        depths.append(depth)
    assert depths[0] == 1
    assert depths[20:40].count(0) > 10, "given up"
    assert sum(depths[-100:]) > 20, "and back"


def test_a_factor_learnt_at_one_size_holds_at_all():
    costs = Costs([(1, 1.0), (9, 1.0)], [(1, 0.1), (8, 0.8)])
    planner = DraftPlanner(CHAIN, {0: costs})
    for _ in range(200):
        planner.next_shape()
        planner.record_seconds(planner._num_levels, 3.0, 3.0 * costs.draft_seconds(planner._num_levels))
    slow = Costs([(1, 3.0), (9, 3.0)], [(1, 0.3), (8, 2.4)])
    for depth in (1, 8):
        wanted = slow.verify_seconds(depth + 1) + slow.draft_seconds(depth)
        assert planner._seconds(depth, depth, 0) == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("slower", [(1, 2, 1), (1, 1, 3), (3, 3, 3), (1, 8, 8)], ids=str)
def test_costs_measured_beside_other_work_do_not_end_drafting(slower):
    """`slower`: how much longer a pass over the root, over a tree, and a draft were measured to take than they do."""
    true = Costs([(1, 1.0), (2, 1.05), (9, 1.2)], [(1, 0.1), (8, 0.7)])
    root, tree, draft = slower
    measured = Costs(
        [(size, seconds * (tree if size > 1 else root)) for size, seconds in true.verify],
        [(levels, draft * seconds) for levels, seconds in true.draft],
    )
    planner, depths = DraftPlanner(CHAIN, {0: measured}), []
    for cycle in range(200):
        shape = planner.next_shape()
        depth = shape.depth if shape else 0
        planner.record_seconds(depth, true.verify_seconds(depth + 1), true.draft_seconds(depth))
        planner.record(depth, min(depth, (1, 3, 0, 2)[cycle % 4]))
        depths.append(depth)
    assert depths[100:].count(0) < 10
    assert abs(mean(depths[100:]) - mean(settled(true, None))) < 0.7


def test_what_every_cycle_does_besides_makes_longer_drafts_worth_while():
    """A cycle that costs more anyway should bring more: 0.7 accepted, pass 1, draft 0.2 a level, and then the rest."""
    costs = Costs([(1, 1.0), (9, 1.4)], [(1, 0.2), (8, 1.6)])
    depths = []
    for rest in (0.0, 1.0, 3.0):
        planner = DraftPlanner(CHAIN, {0: costs})
        for _ in range(100):
            planner.record_seconds(0, costs.verify_seconds(1), 0.0, rest)
        shape = planner.next_shape()
        depths.append(shape.depth if shape else 0)
    rates = [PRIOR_RATE] * 8

    def best(rest: float) -> int:
        return best_chain(rates, Costs([(n, s + rest) for n, s in costs.verify], costs.draft))

    assert depths == [best(0.0), best(1.0), best(3.0)]
    assert depths[0] < depths[1] < depths[2]


def test_one_cycle_of_a_thousand_times_the_seconds_changes_little():
    calm, disturbed = settled(CHEAP, CHEAP), settled(CHEAP, CHEAP, hiccup=100)
    assert all(abs(one - other) <= 1 for one, other in zip(calm, disturbed, strict=True))


# --- Depth ---


def test_deep_where_drafts_are_accepted_and_cheap():
    assert live(DraftPlanner(CHAIN, {0: CHEAP}), [8], 30)[-1] == 8


def test_shallow_where_drafts_are_refused():
    drafted = live(DraftPlanner(CHAIN, {0: CHEAP}), [1], 60)
    assert drafted[-1] <= 2 < drafted[0]


def test_shallow_where_drafting_is_dear():
    costs = Costs(verify=[(1, 1.0), (9, 1.2)], draft=[(1, 0.5), (8, 4.0)])
    assert live(DraftPlanner(CHAIN, {0: costs}), [8], 60)[-1] > live(DraftPlanner(CHAIN, {0: costs}), [2], 60)[-1] > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_no_draft_where_it_is_a_loss(shape):
    adapter = DraftPlanner(shape, {0: DEAR})
    drafted = live(adapter, [8], 1000)
    assert set(drafted) == {0, 1}
    assert drafted.index(1) > 30, "whether it is as dear as it was measured to be"
    assert sum(drafted) < 7


def test_no_draft_after_refusals_until_they_are_forgotten():
    """Worth it at the prior's 70 %, not at 0 %: given up after refusals, tried again after a while, then kept."""
    adapter = DraftPlanner(AdaptiveShape(type="adaptive", depth=1), {0: Costs([(1, 1.0), (2, 1.2)], [(1, 0.2)])})
    refused = live(adapter, [0], 200)
    assert refused[0] == 1, "tried"
    first_pause = refused.index(0)
    assert 1 in refused[first_pause:], "tried again"
    assert refused.count(0) > 3 * refused.count(1), "seldom"
    accepted = live(adapter, [1], 200)
    assert accepted[-50:] == [1] * 50, "back for good"


def test_a_useless_drafter_is_rarely_tried_and_one_that_improves_is_used_again():
    """At first every seventh cycle or so. A refused draft costs time: a useless drafter must hardly be tried."""
    costs = Costs([(1, 1.0), (2, 1.1), (9, 1.5)], [(1, 0.1), (8, 0.8)])
    adapter = DraftPlanner(CHAIN, {0: costs})
    refused = [min(depth, 1) for depth in live(adapter, [0], 1500)]
    assert sum(refused[-1000:]) <= 20, "2 % of the cycles"
    assert sum(refused[-1000:]) >= 3, "never again would be for good"
    accepted = live(adapter, [8], 400)
    assert min(accepted[-50:]) > 0, "back for good"


def expected_rates(history: list[tuple[int, int]], depth: int) -> list[float]:
    """Acceptance by level, summed up from all cycles at once: age weights, then shrinking to the level before."""
    rates, belief = [], PRIOR_RATE
    for level in range(depth):
        weights = [FORGET**age for age in range(len(history) - 1, -1, -1)]
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
    """The depth of most tokens per second by brute force, 0 included."""

    def rate(depth: int) -> float:
        expected = sum(math.prod(rates[:level]) for level in range(depth + 1))
        return expected / (costs.verify_seconds(depth + 1) + costs.draft_seconds(depth))

    return max(range(len(rates) + 1), key=rate)


@pytest.mark.parametrize("seed", range(8))
def test_the_depth_is_the_best_by_brute_force(seed):
    """Random costs and histories, in which many drafts were cut short."""
    generator = random.Random(seed)
    chosen = set()
    for _ in range(30):
        verify, draft = 1.0, 0.0
        costs = Costs(
            [(n, verify := verify + generator.random() * 0.3) for n in (1, 2, 3, 4, 6, 8, 9)],
            [(n, draft := draft + generator.random() * 0.3) for n in (1, 2, 3, 4, 6, 8)],
        )
        adapter = DraftPlanner(CHAIN, {0: costs})
        history = []
        for _ in range(generator.randrange(40)):
            drafted = 1 + generator.randrange(8)  # without pauses, whose cycles count for less
            history.append((drafted, min(drafted, int(generator.expovariate(0.3)))))
            adapter.record(*history[-1])
        shape = adapter.next_shape()
        best = best_chain(expected_rates(history, 8), costs)
        assert shape == (ChainShape(type="chain", depth=best) if best else None)
        chosen.add(best)
    assert len(chosen) >= 3, "one answer to every question proves nothing"


def test_drafts_cut_short_say_nothing_about_the_levels_they_never_had():
    """All of two levels accepted, again and again: the third is believed to be as good, not refused."""
    cut, refused = DraftPlanner(CHAIN, {0: CHEAP}), DraftPlanner(CHAIN, {0: CHEAP})
    for _ in range(60):
        cut.record(2, 2)
        refused.record(3, 2)
    deep, shallow = cut.next_shape(), refused.next_shape()
    assert deep is not None
    assert shallow is not None
    assert deep.depth == 8 > shallow.depth == 2


def test_cycles_without_a_draft_are_no_refusals():
    adapter, other = DraftPlanner(CHAIN, {0: CHEAP}), DraftPlanner(CHAIN, {0: CHEAP})
    for _ in range(500):
        adapter.record(0, 0)
    assert adapter.next_shape() == other.next_shape()


# --- Nodes ---


def best_budget(log_probs: list[float], trust: float, costs: Costs, depth: int) -> int:
    def rate(count: int) -> float:
        expected = 1.0 + trust * sum(map(math.exp, log_probs[:count]))
        return expected / (costs.verify_seconds(count + 1) + costs.draft_seconds(depth))

    return max(range(1, len(log_probs) + 1), key=rate)


def log_probs_of(seed: int, count: int = 40) -> list[float]:
    generator = random.Random(seed)
    return sorted((-generator.expovariate(0.6) for _ in range(count)), reverse=True)


def after_cycles(costs: Costs, accepted: int, cycles: int) -> tuple[DraftPlanner, float]:
    """An adapter that has seen that many accepted in every cycle, and its trust, summed up apart."""
    adapter, promised, kept = DraftPlanner(TREE, {0: costs}), 0.0, 0.0
    log_probs = [math.log(0.5)] * 3
    for _ in range(cycles):
        shape = adapter.next_shape()
        if shape is None:
            adapter.record(0, 0)
            promised, kept = promised * FORGET, kept * FORGET
            continue
        count = adapter.budget(log_probs)
        adapter.record(shape.depth, accepted)
        promised, kept = promised * FORGET + 0.5 * count, kept * FORGET + accepted
    return adapter, (kept + PRIOR_WEIGHT) / (promised + PRIOR_WEIGHT)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_budget_is_the_best_by_brute_force(accepted):
    costs = Costs([(1, 1.0), (4, 1.1), (16, 2.0), (41, 6.0)], [(1, 0.05), (6, 0.3)])
    budgets = set()
    for seed in range(20):
        adapter, trust = after_cycles(costs, accepted, 12)
        shape = adapter.next_shape()
        log_probs = log_probs_of(seed)
        budgets.add(adapter.budget(log_probs))
        assert adapter.budget(log_probs) == best_budget(log_probs, trust, costs, shape.depth if shape else 0)
    assert len(budgets) >= 3


def test_the_budget_grows_with_trust():
    costs = Costs([(1, 1.0), (41, 6.0)], [(1, 0.05), (6, 0.3)])
    budgets = []
    for accepted in (0, 1, 3):
        adapter, _ = after_cycles(costs, accepted, 40)
        adapter.next_shape()
        budgets.append([adapter.budget(log_probs_of(seed)) for seed in range(10)])
    for less, more in pairwise(budgets):
        assert all(a <= b for a, b in zip(less, more, strict=True))
        assert sum(less) < sum(more)


def test_a_budget_is_at_least_one_node_and_at_most_those_there_are():
    adapter = DraftPlanner(TREE, {0: CHEAP})
    adapter.next_shape()
    assert adapter.budget([-50.0] * 7) == 1
    assert adapter.budget([-math.inf] * 7) == 1
    assert adapter.budget([0.0] * 7) == 7


def test_trees_are_priced_by_the_nodes_that_are_kept():
    """All nodes of a shape would be a loss, a few are a gain: so there is a draft, as deep as a chain's at first."""
    costs = Costs([(1, 1.0), (41, 12.0)], [(1, 0.05), (6, 0.3)])
    assert TREE.at(1).num_nodes == 4
    assert 4 / (costs.verify_seconds(5) + costs.draft_seconds(1)) > 1
    assert 7 / (costs.verify_seconds(41) + costs.draft_seconds(6)) < 1
    tree, chain = DraftPlanner(TREE, {0: costs}), DraftPlanner(AdaptiveShape(type="adaptive", depth=6), {0: costs})
    first, reference = tree.next_shape(), chain.next_shape()
    assert isinstance(first, DynamicShape)
    assert reference is not None
    assert first.depth == reference.depth
    sure = [math.log(0.95) * (1 + node) for node in range(6)] + [-9.0] * 34
    for _ in range(40):
        shape = tree.next_shape()
        assert shape is not None
        assert tree.budget(sure[: shape.num_nodes]) <= 6
        tree.record(shape.depth, shape.depth)
    deep = tree.next_shape()
    assert deep is not None
    assert deep.depth >= 5, "deep where the few nodes kept are accepted"


def test_many_nodes_kept_make_depth_dear():
    """The same acceptance with more nodes verified for it: a shallower tree."""
    costs = Costs([(1, 1.0), (41, 4.0)], [(1, 0.05), (6, 0.3)])
    depths = []
    for flat in (False, True):
        adapter = DraftPlanner(TREE, {0: costs})
        for _ in range(60):
            adapter.next_shape()
            adapter.budget([0.0] * 40 if flat else [0.0] * 4)
            adapter.record(4, 3)
        shape = adapter.next_shape()
        depths.append(shape.depth if shape else 0)
    assert depths[0] > depths[1]


# --- Efforts ---


def efforts_at(*per_level: float) -> dict[int, Costs]:
    """Costs of efforts 0, 1, ... by what a level takes, of a pass of 1."""
    return {
        effort: Costs([(1, 1.0), (64, 1.3)], [(1, seconds), (8, 8 * seconds)])
        for effort, seconds in enumerate(per_level)
    }


def share_of(effort: int, planner: DraftPlanner, refusals: list[float], cycles: int = 300, seed: int = 0) -> float:
    """Of all cycles, those that draft with this effort, if so many of each effort's levels are refused."""
    generator = random.Random(seed)
    used = 0
    for _ in range(cycles):
        shape = planner.next_shape()
        depth, accepted = shape.depth if shape else 0, 0
        while accepted < depth and generator.random() > refusals[planner.effort]:
            accepted += 1
        used += bool(depth) and planner.effort == effort
        planner.record(depth, accepted)
    return used / cycles


CHAINS = [CHAIN, AdaptiveShape(type="adaptive", depth=5)]


@pytest.mark.parametrize("shape", CHAINS, ids=lambda shape: shape.name)
def test_the_effort_of_most_tokens_per_second_is_found(shape):
    equal = [0.2, 0.19, 0.18]
    assert share_of(0, DraftPlanner(shape, efforts_at(0.05, 0.15, 0.3)), equal) > 0.9, "dearer for nothing"
    better = [0.35, 0.2, 0.05]
    assert share_of(2, DraftPlanner(shape, efforts_at(0.05, 0.06, 0.07)), better) > 0.75, "better for little"
    assert share_of(1, DraftPlanner(shape, efforts_at(0.05, 0.06, 0.4)), [0.4, 0.1, 0.09]) > 0.75, "the one between"


@pytest.mark.parametrize("shape", CHAINS, ids=lambda shape: shape.name)
def test_an_effort_that_has_become_better_is_found_again(shape):
    planner = DraftPlanner(shape, efforts_at(0.05, 0.07))
    assert share_of(0, planner, [0.1, 0.4]) > 0.8
    share_of(1, planner, [0.5, 0.1], cycles=150, seed=1)
    assert share_of(1, planner, [0.5, 0.1], cycles=100, seed=2) > 0.5


def test_of_several_efforts_none_is_drafted_with_where_all_are_a_loss():
    planner = DraftPlanner(CHAIN, efforts_at(3.0, 4.0))
    assert planner.next_shape() is None
    assert planner.effort == 0


def test_the_same_past_gives_the_same_choice():
    def choices() -> list[tuple[int, int]]:
        planner, made = DraftPlanner(CHAIN, efforts_at(0.05, 0.08, 0.1)), []
        for cycle in range(100):
            shape = planner.next_shape()
            depth = shape.depth if shape else 0
            planner.record_seconds(depth, 1.0 + 0.01 * (cycle % 7), 0.06 * depth)
            planner.record(depth, min(depth, cycle * 7 % 5))
            made.append((planner.effort, depth))
        return made

    assert choices() == choices()
    assert len({effort for effort, _ in choices()}) >= 2


def test_an_effort_that_takes_longer_than_was_measured_is_corrected_alone():
    """Effort 1 really takes thrice as long; effort 0 is believed to take what it takes."""
    planner, depth = DraftPlanner(AdaptiveShape(type="adaptive", depth=5), efforts_at(0.1, 0.1)), 5
    for cycle in range(120):
        planner.next_shape()
        planner.effort, planner._num_levels = cycle % 2, depth  # both in turn
        planner.record_seconds(depth, 1.02, (0.5, 1.5)[planner.effort])
    taken = [planner._seconds(depth, depth, effort) - planner._seconds(depth, 0, effort) for effort in (0, 1)]
    assert taken == pytest.approx([0.5, 1.5], rel=0.3)
