"""What to draft on a device: the depth, N and nodes that give most expected tokens per second over the connection.

    tokens of a cycle     E = 1 + a_1 + a_1 a_2 + ...                    a_k: acceptance at level k with this N
    seconds of a cycle    draft(k, N) + reply(n) + E * tail(N)           n: nodes that are sent

draft(k, N) is the time of drafting k levels, fitted as a line in k: some drafters make all levels at once.
reply(n) is the time from sending a draft of n nodes to its answer: round trip, wait at the server, the target's pass,
and the transfer of memory. It is fitted to the latest cycles as a line in n, so it needs no knowledge of the network.
Where the server's engine plans from costs that are measured at start-up (`decoding.planning.controller`), a device has
only these two lines; acceptance, the yield of pruned trees and the choice of nodes are the same code.
tail(N) is the transfer time of the keys and values of one token in the target's last N layers (see
`edge.device.bandwidth`). Those that are missing before N can be used count as spread over the next cycles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from moray.decoding.planning.acceptance import Acceptance
from moray.decoding.planning.draft_yield import DraftYield
from moray.decoding.planning.node_budget import best_node_count
from moray.edge.device.bandwidth import Bandwidth
from moray.trees.ranking import Pruned, prune
from moray.trees.shapes import AdaptiveShape, AnyShape, GrowableShape
from moray.trees.tree import TokenTree

_DECAY_REPLY, _DECAY_DRAFT = 0.9, 0.99
"""Factors on the weight of a cycle's times for every cycle after it: the network changes sooner than the drafter."""
_DOUBT = 1e-3
"""Added to the variance of the sizes: while all drafts are equally large, nothing is known of the slope."""
_SPREAD_CYCLES = 16
"""Cycles over which the cost of missing keys and values is spread."""
_PROBE_EVERY = 16
"""One wide draft in this many is sent with half of the nodes chosen for it, so that the cost of a node can be
measured."""
_MIN_SECONDS = 1e-6
"""Time of a cycle while none was measured."""


class _LineFit:
    """seconds = base + slope * size, fitted to the latest cycles; neither is negative."""

    def __init__(self, decay: float, *, is_proportional: bool) -> None:
        """
        Args:
            decay: factor on the weight of a cycle for every cycle after it.
            is_proportional: whether seconds are taken to be in proportion to the size while all drafts are equally
                large; else they are taken not to depend on it.
        """
        self._decay, self._is_proportional = decay, is_proportional
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, size: int, seconds: float) -> None:
        for name, value in (("weight", 1), ("x", size), ("y", seconds), ("xx", size**2), ("xy", size * seconds)):
            setattr(self, f"_{name}", self._decay * getattr(self, f"_{name}") + value)

    def at(self, size: int) -> float:
        if not self._weight:
            return 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        steepest = mean_y / mean_x if mean_x else 0.0
        variance = max(0.0, self._xx / self._weight - mean_x**2)
        covariance = self._xy / self._weight - mean_x * mean_y
        slope = (covariance + _DOUBT * steepest * self._is_proportional) / (variance + _DOUBT)
        return mean_y + min(max(0.0, slope), steepest) * (size - mean_x)


@dataclass(frozen=True)
class CyclePlan:
    """What to draft next."""

    shape: GrowableShape
    num_target_layers: int
    """N of this draft."""
    next_num_target_layers: int
    """N of the drafts to come: the server is to send what it needs."""


class CyclePlanner:
    """Chooses shape and N of each draft."""

    def __init__(
        self,
        shape: AnyShape,
        layer_counts: Sequence[int] = (0,),
        layer_bytes: float = 0.0,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        """
        Args:
            shape: what may be drafted; one that is not adaptive is always drafted.
            layer_counts: values of N that the drafter can draft with.
            layer_bytes: bytes of a token's keys and values in one of the target's last layers, as they cross.
            bandwidth: measures how long bytes take.
        """
        self._shape = shape
        self._layer_counts = tuple(layer_counts)
        self._layer_bytes = layer_bytes
        self._bandwidth = bandwidth or Bandwidth()
        self._acceptance = Acceptance(shape.depth, self._layer_counts)
        self._yield = DraftYield()
        self._num_pruned = 0
        self._reply = _LineFit(_DECAY_REPLY, is_proportional=False)
        self._drafts: dict[int, _LineFit] = {}
        """Times of drafting, by N."""

    def prune(self, tree: TokenTree, plan: CyclePlan) -> Pruned | None:
        """Reduce a draft to the nodes that are worth sending. None unless the shape is adaptive with breadth above 1:
        other drafts are sent whole.

        Args:
            tree: drafted by `plan`.
            plan: the last one.
        """
        if not isinstance(self._shape, AdaptiveShape) or tree.scores is None:
            return None
        self._num_pruned += 1
        (pruned,) = prune([tree], partial(self._nodes_worth_sending, plan))
        return pruned

    def _nodes_worth_sending(self, plan: CyclePlan, log_probs: list[list[float]]) -> int:
        seconds_of = partial(self._seconds_with_nodes, plan)
        best = best_node_count(log_probs, 1, self._yield.trust, seconds_of)
        return -(-best // 2) if self._num_pruned % _PROBE_EVERY == 2 else best

    def _seconds_with_nodes(self, plan: CyclePlan, count: int) -> float:
        seconds = self._seconds_of_draft(plan.num_target_layers, plan.shape.depth) + self._reply.at(count)
        return max(_MIN_SECONDS, seconds)

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a draft, root not counted."""
        return self._shape.num_nodes

    def plan(self, missing: Sequence[int] = ()) -> CyclePlan:
        """What to draft next.

        Args:
            missing: of the target's last layer, the one before it, and so on: tokens whose keys and values are missing
                here. A draft cannot use such a layer yet.
        """
        absent = {count: sum(missing[:count]) for count in self._layer_counts}
        best, depth, _ = self._best(absent)
        usable = best
        if absent[best]:
            ready = {count: 0 for count, tokens in absent.items() if not tokens}
            usable, depth, _ = self._best(ready or {self._layer_counts[0]: 0})
        shape = self._shape.at(depth) if isinstance(self._shape, AdaptiveShape) else self._shape
        return CyclePlan(shape, usable, best)

    def _best(self, absent: dict[int, int]) -> tuple[int, int, float]:
        """N, depth and expected tokens per second of the best plan with one of these N. `absent` has, for each N, the
        tokens whose keys and values are missing, added up over its layers."""
        depths = range(1, self._shape.depth + 1) if isinstance(self._shape, AdaptiveShape) else (self._shape.depth,)
        found: tuple[int, int, float] = (min(absent), depths[0], 0.0)
        for count, tokens in absent.items():
            rates = self._acceptance.rates(count, in_doubt=True)
            expected, survival = 1.0, 1.0
            fetch = self._bandwidth.seconds(tokens * self._layer_bytes) / _SPREAD_CYCLES
            tail = self._bandwidth.seconds(count * self._layer_bytes)
            for depth in range(1, self._shape.depth + 1):
                survival *= rates[depth - 1]
                expected += survival
                if depth not in depths:
                    continue
                reply = self._reply.at(self._expected_nodes(depth))
                seconds = self._seconds_of_draft(count, depth) + reply + expected * tail + fetch
                rate = expected / seconds if seconds else expected
                if rate > found[2]:
                    found = count, depth, rate
        return found

    def _expected_nodes(self, depth: int) -> int:
        """Nodes that are sent of a draft of so many levels: all of them, and of a wide adaptive tree as many per level
        as pruning kept recently."""
        if not isinstance(self._shape, AdaptiveShape):
            return self._shape.num_nodes
        return min(self._shape.at(depth).num_nodes, math.ceil(depth * self._yield.nodes_per_level)) if depth else 0

    def _seconds_of_draft(self, count: int, levels: int) -> float:
        """For an N that was not used yet, that of the next smaller one that was."""
        known = [n for n in self._drafts if n <= count]
        return self._drafts[max(known)].at(levels) if known else 0.0

    def record_draft(self, levels: int, seconds: float, num_target_layers: int = 0) -> None:
        """Record the time that a draft took, unless it is the first one with this N, which is slower."""
        if num_target_layers not in self._drafts:
            self._drafts[num_target_layers] = _LineFit(_DECAY_DRAFT, is_proportional=True)
        else:
            self._drafts[num_target_layers].add(levels, seconds)

    def record_reply(
        self,
        levels: int,
        num_accepted: int,
        seconds: float,
        num_target_layers: int = 0,
        tail_tokens: int = 0,
        pruned: Pruned | None = None,
    ) -> None:
        """Record the answer to a draft.

        Args:
            levels: of the draft.
            num_accepted: how many of them were accepted.
            seconds: since it was sent.
            num_target_layers: N that it was drafted with.
            tail_tokens: tokens whose keys and values came with the answer, over all of the target's last layers.
            pruned: what of the draft was sent; None for all of it.
        """
        nodes = 0 if pruned is None else pruned.tree.num_nodes - 1
        is_usual = tail_tokens <= max(self._layer_counts) * (levels + 1)  # else it made up for what was missing
        if is_usual:
            transfer = self._bandwidth.seconds(tail_tokens * self._layer_bytes)
            self._reply.add(nodes or self._expected_nodes(levels), max(0.0, seconds - transfer))
        self._acceptance.record(num_target_layers, levels, num_accepted)
        self._yield.record_nodes(levels, nodes, num_accepted, 0.0 if pruned is None else pruned.promised)
