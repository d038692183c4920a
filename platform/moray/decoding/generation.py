"""One answer and what each of its cycles did: the raw data for tau, acceptance and efficiency.

Counts and times over all answers of an engine are `decoding.engine.stats.EngineStats`; `Generation.phases` is this
answer's share of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AliasChoices, Field

from moray.decoding.engine.stats import CYCLE_PHASES
from moray.decoding.request import RequestOutput

_LayerCounts = Annotated[list[int], Field(validation_alias=AliasChoices("layer_counts", "efforts"))]
"""Answers recorded before version 0.2 call this field efforts."""


@dataclass
class Generation:
    """One answer and how it was generated."""

    tokens: list[int]
    finish_reason: str = "length"
    """"stop" (an end-of-sequence token or the token that completes a stop string, the last of `tokens`) or "length"."""
    accepted: list[int] = field(default_factory=list)
    """Draft tokens accepted in each cycle."""
    emitted: list[int] = field(default_factory=list)
    """Tokens emitted by each cycle, including the target's own; fewer if the answer ended in it."""
    drafted: list[int] = field(default_factory=list)
    """Levels drafted in each cycle. The deepest levels of an adaptive tree may hold no nodes worth verifying."""
    nodes: list[int] = field(default_factory=list)
    """Draft nodes verified in each cycle, root not counted."""
    layer_counts: _LayerCounts = field(default_factory=list)
    """The N of each cycle's draft (see `Drafter.layer_counts`); meaningless for a cycle without a draft."""
    seconds: float = 0.0
    """Decoding time, without prefill."""
    prefill_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CYCLE_PHASES, 0.0))
    """Seconds by phase of the cycle."""

    @property
    def num_cycles(self) -> int:
        """Target passes after the prefill."""
        return len(self.accepted)

    def add(self, update: RequestOutput) -> None:
        """Add the output of one engine step: the first token, which the prefill produces, or a cycle."""
        if self.tokens:
            self.accepted.append(update.num_path)
            self.emitted.append(len(update.tokens))
            self.drafted.append(update.num_levels)
            self.nodes.append(update.num_nodes)
            self.layer_counts.append(update.num_target_layers)
        self.tokens += update.tokens
        self.finish_reason = update.finish_reason or self.finish_reason


def acceptance_by_position(generations: Sequence[Generation]) -> list[float]:
    """P(the draft token at depth k is accepted | its path up to depth k-1 was): index 0 is depth 1."""
    depth = max((max(g.drafted, default=0) for g in generations), default=0)
    reached, passed = [0] * depth, [0] * depth
    for generation in generations:
        for accepted, drafted in zip(generation.accepted, generation.drafted, strict=True):
            for level in range(min(accepted + 1, drafted)):
                reached[level] += 1
                passed[level] += level < accepted
    return [p / r for p, r in zip(passed, reached, strict=True) if r]


def depth_shares(generations: Sequence[Generation]) -> list[float]:
    """Share of the cycles by levels drafted; index 0 is the share without a draft."""
    drafted = [levels for generation in generations for levels in generation.drafted]
    return [drafted.count(levels) / len(drafted) for levels in range(max(drafted, default=-1) + 1)]


def layer_count_shares(generations: Sequence[Generation]) -> dict[int, float]:
    """Share of each N among the cycles that drafted something."""
    used = [
        num_target_layers
        for generation in generations
        for num_target_layers, drafted in zip(generation.layer_counts, generation.drafted, strict=False)
        if drafted
    ]
    return {num_target_layers: used.count(num_target_layers) / len(used) for num_target_layers in sorted(set(used))}


def tau(generations: Sequence[Generation]) -> float:
    """Tokens emitted per target pass, bonus token included."""
    cycles = sum(g.num_cycles for g in generations)
    return sum(sum(g.emitted) for g in generations) / cycles if cycles else 0.0
