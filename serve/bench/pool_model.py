"""What numbers of target and drafter replicas promise: a model of who waits for whom, in one function.

Assumed, and nothing else: every pass and every draft takes exactly what its number of sequences says; `num_sequences`
are decoded all the time, and are spread evenly over targets, groups and drafters; a replica does one thing after
another, first come first served; every draft comes in time. Prompts, accepting and HTTP cost nothing.

A group of sequences (all those of a target, or with two groups half of them) is drafted for, verified, drafted for,
verified. One such cycle takes the longest of

    alone       draft + way there and back + pass     it waits for nobody
    targets     groups * pass                         its target has the other group's pass to do
    drafters    targets * groups * draft              a drafter drafts for every group of every target, in turn

    tokens/s = tau * num_sequences / cycle

which is exact for times that do not vary (a closed cycle of stations with fixed times), and a bound for times that do.
For one target, one drafter and one group that is S = tau / (v + gamma c + o); two groups reach for
S <= tau / max(v, gamma c + rtt), and get there if half a group is served in half the time: where passes and drafts take
as long for half of the sequences, two groups gain nothing.
"""

from dataclasses import dataclass

from moray.decoding.synthetic import SyntheticCosts


@dataclass(frozen=True)
class Pools:
    """How many replicas share how many sequences."""

    num_targets: int
    num_drafters: int
    num_sequences: int
    num_micro_batches: int = 1
    """Of each target's sequences: 2 for alternating half-batches."""


@dataclass(frozen=True)
class Cycle:
    """One cycle of a group, in seconds."""

    alone: float
    targets: float
    drafters: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return max(self.alone, self.targets, self.drafters)

    @property
    def bound(self) -> str:
        """What it waits for: "drafters" or "targets" if more of those would shorten it, else "alone"."""
        if self.alone >= self.seconds:
            return "alone"
        return "drafters" if self.drafters > self.targets else "targets"


def cycle_of(pools: Pools, costs: SyntheticCosts, channel_seconds: float = 0.0) -> Cycle:
    """What a cycle takes.

    Args:
        pools: who shares the work.
        costs: of a pass and of a draft.
        channel_seconds: the way to a drafter and back, which occupies neither side.
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
    """What all sequences together get; infinite where nothing costs anything."""
    seconds = cycle_of(pools, costs, channel_seconds).seconds
    return tau * pools.num_sequences / seconds if seconds else float("inf")
