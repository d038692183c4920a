"""What an engine has done so far: counters that only grow, for the metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CYCLE_PHASES = ("propose", "verify", "accept", "commit", "observe")
"""What a cycle consists of."""
PHASES = ("admit", "prefill", "prefill_drafter", *CYCLE_PHASES)
"""Keys of `EngineStats.seconds`. "observe" and "prefill_drafter" both send verified tokens to drafters: "observe" those
of the last cycles, "prefill_drafter" a whole prompt or the backlog of a long pause."""


@dataclass
class Timer:
    """How long one phase of a cycle took, nested phases included; set once it is over."""

    seconds: float = 0.0


@dataclass
class EngineStats:
    """Counts and seconds since the engine was made."""

    wait: Callable[[], None] | None = None
    """Waits for the device at the end of each phase, if phases are to be timed separately on a GPU."""
    num_steps: int = 0
    num_passes: int = 0
    """Target passes."""
    num_rows: int = 0
    """Sequences in those passes."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Tokens emitted."""
    num_cycle_tokens: int = 0
    """Tokens emitted by cycles: all but the first of every answer. Divided by `num_rows`, this is tau."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By depth of the draft token, how many were accepted."""
    num_missed: int = 0
    """Drafts that were requested and did not arrive in time."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """By phase; no time is counted twice."""
    _within: float = 0.0
    """Seconds of the phases nested in the current one."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[Timer]:
        """Add the time spent inside to a phase, less that of nested phases.

        Unless each phase waits for the device, work that a phase queues on a GPU counts for the next phase that needs
        its result.
        """
        before, self._within = self._within, 0.0
        timer, begin = Timer(), time.perf_counter()
        yield timer
        if self.wait is not None:
            self.wait()
        timer.seconds = time.perf_counter() - begin
        self.seconds[phase] += timer.seconds - self._within
        self._within = before + timer.seconds

    def record(self, num_nodes: int, num_accepted: int, num_emitted: int) -> None:
        """Record one sequence's cycle: nodes drafted below the root, how many of them are in the answer, tokens
        emitted."""
        self.num_rows += 1
        self.num_tokens += num_emitted
        self.num_cycle_tokens += num_emitted
        if num_nodes:
            self.num_drafts += 1
            self.num_draft_tokens += num_nodes
            self.num_accepted_tokens += num_accepted
            self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
            for level in range(num_accepted):
                self.accepted_at[level] += 1
