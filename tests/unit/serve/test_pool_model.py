"""The model of pools against a simulation of its stations; tokens per second while all streams are busy."""

import heapq

import pytest

from moray.bench.load.request import RequestRecord
from moray.bench.load.steady import steady_part
from moray.decoding.synthetic import SyntheticCost, SyntheticCosts
from moray.errors import DataError
from serve.bench.pool_model import Pools, cycle_of, tokens_per_second

COSTS = {
    "drafts are dear": SyntheticCosts(verify=SyntheticCost(ms=40), draft=SyntheticCost(ms_per_sequence=20)),
    "passes are dear": SyntheticCosts(verify=SyntheticCost(ms_per_sequence=20), draft=SyntheticCost(ms=10)),
    "both": SyntheticCosts(
        verify=SyntheticCost(ms=30, ms_per_sequence=3), draft=SyntheticCost(ms=10, ms_per_sequence=4)
    ),
}
CHANNEL = 0.004


def simulated_cycle(pools: Pools, costs: SyntheticCosts) -> float:
    """Seconds of a group's cycle once all is settled: every station does one thing after another, first come first
    served, and a group is drafted for by all drafters together."""
    rows = pools.num_sequences / (pools.num_targets * pools.num_micro_batches)
    draft, verify = costs.draft.seconds(rows / pools.num_drafters), costs.verify.seconds(rows)
    drafters, targets = [0.0] * pools.num_drafters, [0.0] * pools.num_targets
    # (time, number, group, what comes next); everybody begins at once
    groups = [(target, half) for target in range(pools.num_targets) for half in range(pools.num_micro_batches)]
    events = [(0.0, number, group, "draft") for number, group in enumerate(groups)]
    count, ends = len(events), []
    while len(ends) < 600:
        now, _, group, what = heapq.heappop(events)
        if what == "draft":
            drafters = [max(free, now + CHANNEL / 2) + draft for free in drafters]
            then, follows = max(drafters) + CHANNEL / 2, "verify"
        else:
            then = targets[group[0]] = max(targets[group[0]], now) + verify
            follows = "draft"
            if group == groups[0]:
                ends.append(then)
        count += 1
        heapq.heappush(events, (then, count, group, follows))
    return (ends[-1] - ends[300]) / (len(ends) - 1 - 300)


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("num_targets", "num_drafters"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_a_cycle_takes_what_a_simulation_takes(num_targets, num_drafters, num_micro_batches, costs):
    pools = Pools(num_targets, num_drafters, num_sequences=24, num_micro_batches=num_micro_batches)
    assert simulated_cycle(pools, costs) == pytest.approx(cycle_of(pools, costs, CHANNEL).seconds, rel=1e-3)


def test_one_pair_is_the_formula_of_speculative_decoding():
    """S = tau / (v + gamma c + o) with one group; tau / max(v, gamma c + rtt) with two, if halves cost half."""
    halves = SyntheticCosts(verify=SyntheticCost(ms_per_sequence=5), draft=SyntheticCost(ms_per_sequence=3))
    one, two = Pools(1, 1, 8, num_micro_batches=1), Pools(1, 1, 8, num_micro_batches=2)
    assert tokens_per_second(one, halves, 4.0, CHANNEL) == pytest.approx(4 * 8 / (0.040 + 0.024 + CHANNEL))
    assert tokens_per_second(two, halves, 4.0, CHANNEL) == pytest.approx(4 * 8 / 0.040)
    assert tokens_per_second(one, SyntheticCosts(), 4.0) == float("inf")


def test_two_groups_gain_nothing_where_half_a_batch_takes_as_long():
    fixed = SyntheticCosts(verify=SyntheticCost(ms=40), draft=SyntheticCost(ms=40))
    assert cycle_of(Pools(1, 1, 8, 2), fixed).seconds == cycle_of(Pools(1, 1, 8, 1), fixed).seconds


@pytest.mark.parametrize(
    ("name", "more_targets", "more_drafters"), [("drafts are dear", 1.0, 2.0), ("passes are dear", 2.0, 1.0)]
)
def test_each_pool_alone_helps_where_it_is_what_is_waited_for(name, more_targets, more_drafters):
    costs = COSTS[name]
    base = cycle_of(Pools(1, 1, 16, 2), costs)
    assert base.seconds / cycle_of(Pools(2, 1, 16, 2), costs).seconds == pytest.approx(more_targets)
    assert base.seconds / cycle_of(Pools(1, 2, 16, 2), costs).seconds == pytest.approx(more_drafters)
    assert base.bound == {"drafts are dear": "drafters", "passes are dear": "targets"}[name]


def answered(index: int, start: float, times: list[float]) -> RequestRecord:
    return RequestRecord(
        index, "q", 0.0, start, times[-1], "ok", None, times, [2.0] * len(times), sizes_are_tokens=True
    )


def test_only_the_time_counts_in_which_all_streams_are_busy():
    records = [answered(0, 0, [1, 2, 3]), answered(1, 0, [2, 3, 4, 5, 6]), answered(2, 3, [5, 6, 7])]
    part = steady_part(records, 2)
    assert part.seconds == 6 - 2, "from the second stream's first token to the first end after the last start"
    assert part.num_tokens == 2 * (1 + 4 + 2)
    assert part.tokens_per_second == 3.5


def test_a_round_that_cannot_be_counted_is_refused():
    records = [answered(0, 0, [1, 2]), answered(1, 0, [1, 2])]
    with pytest.raises(DataError, match="give more num_requests"):
        steady_part(records, 2)
    records[1].outcome, records[1].error = "failed", "500: oh"
    with pytest.raises(DataError, match=r"request 1 cannot be counted .*500: oh"):
        steady_part(records, 1)
    records[1].outcome, records[1].error, records[1].sizes_are_tokens = "ok", None, False
    with pytest.raises(DataError, match="does not say how many tokens"):
        steady_part(records, 1)
