"""How many bytes of tensors a piece of work holds: every allocation and release on the CPU, counted, not sampled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class MemoryUse:
    """Bytes beyond what was there before."""

    peak: int
    """Most at once."""
    left: int
    """At the end, while the result of the work still lives."""
    largest: int
    """Of one tensor."""


def memory_use(work: Callable[[], Any]) -> MemoryUse:
    """Run `work` and count; what it returns lives until the count ends."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    assert profiled.profiler is not None
    events: Any = profiled.profiler.kineto_results
    changes = [event.nbytes() for event in sorted(events.events(), key=lambda e: e.start_ns()) if event.nbytes()]
    del result
    now = peak = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return MemoryUse(peak, now, max(changes, default=0))
