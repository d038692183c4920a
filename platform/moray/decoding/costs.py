"""What the parts of a cycle cost on this machine, measured once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise

_REPEATS = 5


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a cycle take, by size; sizes ascend, between them lines are drawn."""

    verify: Sequence[tuple[int, float]]
    """By tokens of a target pass, the root included."""
    draft: Sequence[tuple[int, float]]
    """By levels drafted."""

    def verify_seconds(self, num_tokens: int) -> float:
        """One target pass."""
        return _interpolate(self.verify, num_tokens)

    def draft_seconds(self, num_levels: int) -> float:
        """One draft; none at all is free."""
        return _interpolate(self.draft, num_levels) if num_levels else 0.0


def measure_costs(
    verify: Callable[[int], object],
    drafts: Mapping[int, Callable[[int], object]],
    sizes: tuple[Sequence[int], Sequence[int]],
    clock: Callable[[], float],
) -> dict[int, Costs]:
    """Time target passes, and drafts of every effort.

    Args:
        verify: runs a target pass of that many tokens and keeps nothing.
        drafts: of each effort, drafts that many levels and keeps nothing.
        sizes: ascending: tokens of a pass, and levels of a draft.
        clock: seconds, read only once the device is idle.
    """
    passes, levels = sizes
    runs = [partial(verify, size) for size in passes]
    runs += [partial(draft, size) for draft in drafts.values() for size in levels]
    for run in runs:
        run()  # the first time of anything is slow
    best = [float("inf")] * len(runs)
    # In turn, and the fastest of each: what else the machine does for a moment hits one run of many sizes, not all
    # runs of one. Interference only ever adds.
    for _ in range(_REPEATS):
        for index, run in enumerate(runs):
            begin = clock()
            run()
            best[index] = min(best[index], clock() - begin)
    seconds = iter(best)
    passed = ascending(passes, list(islice(seconds, len(passes))))
    return {effort: Costs(passed, ascending(levels, list(islice(seconds, len(levels))))) for effort in drafts}


def ascending(sizes: Sequence[int], seconds: Sequence[float]) -> list[tuple[int, float]]:
    """Points of `Costs` from measured seconds, so that more work never takes less time.

    Other work can only add time, so the seconds of a larger size bound those of every smaller one from above.
    """
    bounded = list(accumulate(reversed(seconds), min))
    return list(zip(sizes, reversed(bounded), strict=True))


def median_seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """How long something takes, once it is warm."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    return sorted(seconds)[_REPEATS // 2]


def growing_sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most` itself."""
    sizes = {most}
    power = 1
    while power <= most:
        sizes |= {size for size in (power, power + power // 2) if size <= most}
        power *= 2
    return sorted(sizes)


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (max(x, x0) - x0) / (x1 - x0)
    return points[-1][1]
