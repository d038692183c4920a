"""How deep a device drafts: deeper on a slow connection, shallower where drafts are refused, within what is allowed."""

from moray.edge.device.planner import DepthPlanner
from moray.trees.shapes import AdaptiveShape, FixedShape


def depth_after(reply_seconds: float, accepted: float, draft_seconds: float = 0.005, cycles: int = 60) -> int:
    planner = DepthPlanner(AdaptiveShape(type="adaptive", depth=8))
    for _ in range(cycles):
        levels = planner.plan().depth
        planner.record_draft(levels, draft_seconds * levels)
        planner.record_reply(levels, round(accepted * levels), reply_seconds + 0.001 * levels)
    return planner.plan().depth


def test_the_depth_follows_round_trip_and_acceptance():
    depths = [depth_after(seconds, 0.75) for seconds in (0.005, 0.05, 0.5)]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    assert depth_after(0.05, 0.0) == 1
    assert depth_after(0.05, 1.0) == 8


def test_a_fixed_shape_is_always_drafted():
    shape = FixedShape(type="fixed", branching=(2, 2))
    planner = DepthPlanner(shape)
    planner.record_reply(2, 0, 1.0)
    assert planner.plan() == shape
    assert planner.max_nodes == 6
