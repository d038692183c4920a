"""How many bytes of tensors a piece of work holds: every allocation and release on the CPU, counted, not sampled."""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MARK_BYTES = 7_777


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
    """Run `work` and count; what it returns lives until the count ends.

    The allocator's own totals are read: events are stamped too coarsely to be put in order and added up.
    """
    gc.collect()
    gc.disable()  # otherwise garbage would be released at an unknown time
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            mark = torch.empty(_MARK_BYTES, dtype=torch.uint8)
            result = work()
    finally:
        gc.enable()
    assert profiled.profiler is not None
    kineto: Any = profiled.profiler.kineto_results
    events = list(_allocations(kineto.experimental_event_tree()))
    before = next(event.total_allocated for event in events if event.alloc_size == _MARK_BYTES)
    left = sum(event.alloc_size for event in events) - _MARK_BYTES
    del mark, result
    peak = max(event.total_allocated for event in events) - before
    return MemoryUse(
        peak, left, max((event.alloc_size for event in events if event.alloc_size != _MARK_BYTES), default=0)
    )


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if hasattr(event.extra_fields, "total_allocated"):
            yield event.extra_fields
        yield from _allocations(event.children)
