"""Tokens per second by arithmetic, from acceptance and costs.

    seconds of a cycle    T = draft(B) + pass(n + 1, B) + rest(B)        n tokens drafted for each of B sequences
    tokens per second     B tau / T

With a replay, no average is taken: its continuations are decoded again cycle by cycle, B at a time as the engine admits
them, and each cycle costs what its sequences and their drafts cost. So the end of a batch, where fewer sequences run,
and drafts that prompt lookup leaves empty, are priced as they are.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from moray.bench.plan.costs import CycleCostTable
from moray.bench.plan.replayed import PlannedDraft, ReplayedCycle


@dataclass(frozen=True)
class Prediction:
    """What one drafter, tree and batch would give."""

    tokens_per_second: float
    """Of cycles; reading prompts is not included."""
    tau: float
    draft_share: float
    """Share of the time that drafting takes."""


class PlanRow(TypedDict):
    """A prediction with what it is for, as in plan.json."""

    name: str
    drafter: str
    tree: str
    depth: int
    is_chain: bool
    batch: int
    tokens_per_second: float
    tau: float
    draft_share: float
    break_even_tau: NotRequired[float]
    """Tau at which this row would be as fast as plain decoding."""


class CheckRow(PlanRow):
    """A prediction with what was measured."""

    measured_tokens_per_second: float
    slowdown: float
    """Time of plain cycles beside this row over that in the costs."""
    adjusted_tokens_per_second: float
    """As if the machine had been as fast as when its costs were measured."""
    adjusted_error: float
    spread: float
    measured_tau: float
    error: float
    lossless: bool | None


def simulate(
    costs: CycleCostTable, draft: PlannedDraft, batch: int, continuations: Sequence[Sequence[ReplayedCycle]]
) -> Prediction:
    """Predict decoding these continuations, which are given by their cycles, `batch` at a time."""
    waiting = deque(each for each in continuations if each)
    running: list[deque[ReplayedCycle]] = []
    seconds = drafting = 0.0
    tokens = cycles = 0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(deque(waiting.popleft()))
        now = [own.popleft() for own in running]
        count = len(now)
        if draft.shape is None:
            seconds += costs.plain_seconds(count)
        else:
            spent = _draft_seconds(costs, draft, count)
            drafting += spent
            most = max(cycle.nodes for cycle in now)
            seconds += spent + costs.pass_seconds(count, most + 1) + costs.rest_seconds(count)
        tokens += sum(cycle.emitted for cycle in now)
        cycles += count
        running = [own for own in running if own]
    return Prediction(tokens / seconds, tokens / cycles, drafting / seconds)


def expected(costs: CycleCostTable, draft: PlannedDraft, batch: int, rates: Sequence[float]) -> Prediction:
    """Predict a full batch of chains from rates of acceptance.

    Args:
        costs: seconds of a cycle's parts.
        draft: a chain, or plain decoding.
        batch: number of sequences.
        rates: how often tokens of depth 1, 2, ... are accepted if all before them were.
    """
    if draft.shape is None:
        return Prediction(batch / costs.plain_seconds(batch), 1.0, 0.0)
    tau, survival = 1.0, 1.0
    for rate in rates[: draft.depth]:
        survival *= rate
        tau += survival
    spent = _draft_seconds(costs, draft, batch)
    seconds = spent + costs.pass_seconds(batch, draft.depth + 1) + costs.rest_seconds(batch)
    return Prediction(batch * tau / seconds, tau, spent / seconds)


def _draft_seconds(costs: CycleCostTable, draft: PlannedDraft, num_rows: int) -> float:
    """Seconds of drafting once for each of `num_rows` sequences."""
    assert draft.shape is not None
    if draft.is_chain:
        return costs.draft_seconds(draft.drafter, num_rows, draft.depth)
    return costs.tree_seconds(draft.drafter, draft.shape, num_rows)
