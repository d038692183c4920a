"""Tokens per second by arithmetic, from acceptance and costs.

    seconds of a cycle    T = draft(k, B) + pass(k + 1, B) + rest(B)        k tokens drafted for each of B sequences
    tokens per second     B tau(k) / T

With a replay, no average is taken: its continuations are decoded again cycle by cycle, B at a time as the engine admits
them, and each cycle costs what its sequences and their drafts cost. So the end of a batch, where fewer sequences run,
and drafts that prompt lookup leaves empty, are priced as they are.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moray.bench.plan.costs import CycleCostTable
from moray.bench.replay.chains import ChainMatches


@dataclass(frozen=True)
class Prediction:
    """What one drafter, depth and batch would give."""

    tokens_per_second: float
    """Of cycles; reading prompts is not included."""
    tau: float
    draft_share: float
    """Share of the time that drafting takes."""


def decode(
    costs: CycleCostTable, drafter: str, depth: int, batch: int, continuations: Sequence[ChainMatches]
) -> Prediction:
    """Decode the continuations with chains of `depth`; with 0, plainly."""
    waiting = deque([list(each.cycles(depth)) for each in continuations if each.matched])
    running: list[deque[tuple[int, int, int]]] = []
    seconds = drafting = 0.0
    tokens = cycles = 0
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(deque(waiting.popleft()))
        now = [own.popleft() for own in running]
        count, levels = len(now), max(drafted for drafted, _, _ in now)
        draft = costs.draft_seconds(drafter, count, depth)
        drafting += draft
        if depth:
            seconds += draft + costs.pass_seconds(count, levels + 1) + costs.rest_seconds(count)
        else:
            seconds += costs.plain_seconds(count)
        tokens += sum(emitted for _, _, emitted in now)
        cycles += count
        running = [own for own in running if own]
    return Prediction(tokens / seconds, tokens / cycles, drafting / seconds)


def expected(costs: CycleCostTable, drafter: str, depth: int, batch: int, rates: Sequence[float]) -> Prediction:
    """The same for a full batch, from how often tokens of depth 1, 2, ... are accepted if all before them were."""
    tau, survival = 1.0, 1.0
    for rate in rates[:depth]:
        survival *= rate
        tau += survival
    if not depth:
        return Prediction(batch / costs.plain_seconds(batch), 1.0, 0.0)
    draft = costs.draft_seconds(drafter, batch, depth)
    seconds = draft + costs.pass_seconds(batch, depth + 1) + costs.rest_seconds(batch)
    return Prediction(batch * tau / seconds, tau, draft / seconds)
