"""What the parts of a cycle cost on this machine, measured once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

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
    draft: Callable[[int], object],
    most: tuple[int, int],
    clock: Callable[[], float],
) -> Costs:
    """Time target passes and drafts of growing size.

    Args:
        verify: runs a target pass of that many tokens and keeps nothing.
        draft: drafts that many levels and keeps nothing.
        most: tokens of a pass, and levels of a draft.
        clock: seconds, read only once the device is idle.
    """

    passes, drafts = _sizes(most[0]), _sizes(most[1])
    runs = [partial(verify, size) for size in passes] + [partial(draft, size) for size in drafts]
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
    return Costs(_ascending(passes, best[: len(passes)]), _ascending(drafts, best[len(passes) :]))


def _ascending(sizes: Sequence[int], seconds: Sequence[float]) -> list[tuple[int, float]]:
    """More work is never faster: what says so is noise."""
    return list(zip(sizes, accumulate(seconds, max), strict=True))


def median_seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """How long something takes, once it is warm."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    return sorted(seconds)[_REPEATS // 2]


def _sizes(most: int) -> list[int]:
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
