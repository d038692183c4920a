"""A throughput model for pools: predicts tokens per second from the numbers of target and drafter replicas.

Assumptions: the time of a pass or draft depends only on its number of sequences; `num_sequences` are always being
decoded, spread evenly over targets, groups and drafters; a replica does one thing at a time, first come first served;
every draft arrives in time; prefill, accepting and HTTP cost nothing.

A group of sequences (all of a target's, or half of them with two groups) alternates between drafting and verifying. One
such cycle takes the maximum of

    alone       draft + round trip + pass             it never waits
    targets     groups * pass                         its target also runs the other group's pass
    drafters    targets * groups * draft              a drafter serves every group of every target in turn

    tokens/s = tau * num_sequences / cycle

This is exact for constant times (a closed cycle of stations with fixed service times) and an upper bound otherwise. For
one target, one drafter and one group it is S = tau / (v + gamma c + o). Two groups approach
S <= tau / max(v, gamma c + rtt) and reach it if half the sequences take half the time; if half the sequences take as
long as all of them, two groups gain nothing.
"""

from dataclasses import dataclass

from moray.decoding.synthetic import SyntheticCosts


@dataclass(frozen=True)
class Pools:
    """The numbers of replicas and of sequences that they share."""

    num_targets: int
    num_drafters: int
    num_sequences: int
    num_micro_batches: int = 1
    """Groups per target: 2 for alternating half-batches."""


@dataclass(frozen=True)
class Cycle:
    """The three lower bounds on the cycle of a group, in seconds."""

    alone: float
    targets: float
    drafters: float

    @property
    def seconds(self) -> float:
        """Duration of the cycle, the largest of the three."""
        return max(self.alone, self.targets, self.drafters)

    @property
    def bound(self) -> str:
        """The bottleneck: "drafters" or "targets" if more of those would shorten the cycle, else "alone"."""
        if self.alone >= self.seconds:
            return "alone"
        return "drafters" if self.drafters > self.targets else "targets"


def cycle_of(pools: Pools, costs: SyntheticCosts, channel_seconds: float = 0.0) -> Cycle:
    """Compute the cycle of a group.

    Args:
        pools: numbers of replicas and sequences.
        costs: costs of a pass and of a draft.
        channel_seconds: round trip to a drafter, during which neither side is busy.
    """
    group = pools.num_sequences / (pools.num_targets * pools.num_micro_batches)
    verify = costs.verify.seconds(group)
    draft = costs.draft.seconds(group / pools.num_drafters)
    return Cycle(
        alone=verify + draft + channel_seconds,
        targets=pools.num_micro_batches * verify,
        drafters=pools.num_targets * pools.num_micro_batches * draft,
    )


def tokens_per_second(pools: Pools, costs: SyntheticCosts, tau: float, channel_seconds: float = 0.0) -> float:
    """Throughput of all sequences together; infinite if all costs are zero."""
    seconds = cycle_of(pools, costs, channel_seconds).seconds
    return tau * pools.num_sequences / seconds if seconds else float("inf")
