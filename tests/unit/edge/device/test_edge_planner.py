"""What a device drafts: deeper on a slow connection, shallower where drafts are refused, with more of the target's
last layers where the connection can carry them."""

import math
import random

import torch

from moray.edge.device.bandwidth import Bandwidth
from moray.edge.device.planner import CyclePlanner
from moray.trees.shapes import AdaptiveShape, DynamicShape, FixedShape
from moray.trees.tree import TokenTree, chain_of

CHAIN = AdaptiveShape(type="adaptive", depth=8)


def depth_after(
    reply_seconds: float,
    accepted: float,
    draft_seconds: float = 0.005,
    cycles: int = 60,
    *,
    is_at_once: bool = False,
    slow: tuple[int, ...] = (),
) -> int:
    """The depth that is planned in the end; drafts whose numbers are in `slow` take ten times as long."""
    planner = CyclePlanner(CHAIN)
    for number in range(cycles):
        levels = planner.plan().shape.depth
        factor = 10 if number in slow else 1
        planner.record_draft(levels, draft_seconds * factor * (1 if is_at_once else levels))
        planner.record_reply(levels, round(accepted * levels), reply_seconds + 0.001 * levels)
    return planner.plan().shape.depth


def test_the_depth_follows_round_trip_and_acceptance():
    depths = [depth_after(seconds, 0.75) for seconds in (0.005, 0.05, 0.5)]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    assert depth_after(0.05, 0.0) == 1
    assert depth_after(0.05, 1.0) == 8


def test_a_drafter_that_makes_all_levels_at_once_drafts_deeper():
    assert depth_after(0.03, 0.6, 0.02) < depth_after(0.03, 0.6, 0.02, is_at_once=True)


def test_slow_drafts_are_forgotten():
    usual = depth_after(0.05, 0.75, cycles=300)
    assert usual > 1
    assert depth_after(0.05, 0.75, cycles=300, slow=(0,)) == usual
    assert depth_after(0.05, 0.75, cycles=300, slow=(0, 1, 5)) >= usual - 1


def test_a_fixed_shape_is_always_drafted():
    shape = FixedShape(type="fixed", branching=(2, 2))
    planner = CyclePlanner(shape)
    planner.record_reply(2, 0, 1.0)
    assert planner.plan().shape == shape
    assert planner.max_nodes == 6


def mean_layers_at(bytes_per_second: float, seed: int = 0) -> float:
    """Simulated answers over a link of this rate, with a jitter of 5 ms: the mean N of the drafts. With N = 1 a level
    is accepted four times in five, with N = 0 three times in five; a layer has 4,096 bytes per token, other memory
    2,048."""
    chance, way = random.Random(seed), Bandwidth()
    planner = CyclePlanner(CHAIN, (0, 1), 4096.0, way)
    clock = used = cycles = 0
    for _ in range(6):  # answers to prompts of 300 tokens
        known, here = 300, 0
        clock += 300 * 2048 / bytes_per_second
        way.record(1000.0 + clock - 300 * 2048 / bytes_per_second, clock + chance.random() * 0.005, 300 * 2048)
        for _ in range(60):
            plan = planner.plan([known - here])
            layers, levels = plan.num_target_layers, plan.shape.depth
            assert not layers or here == known
            planner.record_draft(levels, 0.002 * levels, layers)
            accepted = 0
            while accepted < levels and chance.random() < (0.8 if layers else 0.6):
                accepted += 1
            known += accepted + 1
            num_tail = known - here if plan.next_num_target_layers else 0
            num_bytes = (accepted + 1) * 2048 + num_tail * 4096
            begin, jitter = clock, chance.random() * 0.005
            clock += 0.03 + jitter + num_bytes / bytes_per_second
            way.record(1000.0 + begin + 0.03, clock, num_bytes)
            here += num_tail
            planner.record_reply(levels, accepted, clock - begin, layers, num_tail)
            used, cycles = used + layers, cycles + 1
    return used / cycles


def test_n_falls_as_the_link_gets_slower():
    means = [mean_layers_at(megabits * 125_000) for megabits in (50, 10, 2)]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.8
    assert means[-1] < 0.2


def test_the_time_of_a_byte_is_measured_through_jitter_and_queues():
    chance, way = random.Random(1), Bandwidth()
    clock, free = 0.0, 0.0
    for number in range(200):
        num_bytes = 200_000 if number < 2 else chance.randrange(500, 8000)
        clock += 0.0 if number < 2 else 0.1  # the first two are sent at once: the second one waits for the first
        free = max(clock, free) + num_bytes * 4e-7
        way.record(clock - 77.0, free + 0.02 + 0.01 * chance.random(), num_bytes)
    assert abs(way.seconds(1e6) - 0.4) < 0.1
    way.restart()
    for _ in range(5):
        way.record(5e6, 0.0, 10)
    assert abs(way.seconds(1e6) - 0.4) < 0.1, "another clock, the same way"


WIDE = AdaptiveShape(type="adaptive", depth=3, breadth=2, nodes=8)


def tree_of_two_per_level() -> TokenTree:
    """Six nodes below a root: two per level with 0.6 and 0.3 of their parent's probability."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 3, 3])
    depths = torch.tensor([0, 1, 1, 2, 2, 3, 3])
    scores = torch.tensor([0.0, *(math.log(p) for p in (0.6, 0.3, 0.36, 0.18, 0.216, 0.108))])
    ancestors = torch.eye(7, dtype=torch.bool)
    for node in range(1, 7):
        ancestors[node] |= ancestors[parents[node]]
    return TokenTree(torch.arange(7), parents, depths, ancestors, 3, scores=scores)


def num_sent(seconds_per_node: float, *, promises_too_much: bool = False) -> int:
    """Nodes that are sent of a wide draft in the end, where each node takes so long on its way."""
    planner, tree = CyclePlanner(WIDE), tree_of_two_per_level()
    pruned = None
    for _ in range(60):
        plan = planner.plan()
        pruned = planner.prune(tree, plan)
        assert pruned is not None
        nodes = pruned.tree.num_nodes - 1
        planner.record_draft(plan.shape.depth, 0.004)
        accepted = 0 if promises_too_much else min(2, pruned.tree.max_depth)
        planner.record_reply(pruned.tree.max_depth, accepted, 0.02 + seconds_per_node * nodes, pruned=pruned)
    assert pruned is not None
    return pruned.tree.num_nodes - 1


def test_a_wide_draft_is_pruned_to_the_nodes_that_are_worth_sending():
    counts = [num_sent(seconds) for seconds in (0.0, 0.005, 0.1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 6
    assert counts[-1] == 1
    assert num_sent(0.005, promises_too_much=True) < counts[1]


def test_chains_and_trees_that_are_not_adaptive_are_sent_whole():
    tree = tree_of_two_per_level()
    dynamic = CyclePlanner(DynamicShape(type="dynamic", depth=3, breadth=2, nodes=6))
    assert dynamic.prune(tree, dynamic.plan()) is None
    chain = CyclePlanner(CHAIN)
    assert chain.prune(chain_of(torch.arange(4)), chain.plan()) is None


def test_an_empty_draft_is_recorded():
    """As prompt lookup makes where nothing repeats."""
    for shape in (CHAIN, WIDE):
        planner = CyclePlanner(shape)
        planner.record_draft(0, 0.001)
        planner.record_reply(0, 0, 0.02)
        assert planner.plan().shape.depth >= 1
