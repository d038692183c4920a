"""What the parts of a cycle cost on this machine, by number of sequences and size (measured by
`planning.measuring`)."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

_REPEATS = 5

Points = Sequence[tuple[int, float]]
"""(size, seconds) pairs, sizes ascending; values between them are interpolated linearly."""


@dataclass(frozen=True)
class Costs:
    """Seconds that passes and drafts take for a fixed number of sequences."""

    verify: Points
    """By tokens per sequence in a target pass, root included."""
    draft: Mapping[int, Points]
    """By N (see `Drafter.layer_counts`), then by levels drafted."""

    def verify_seconds(self, num_tokens: int) -> float:
        """Time of one target pass."""
        return _interpolate(self.verify, num_tokens)

    def draft_seconds(self, num_levels: int, num_target_layers: int) -> float:
        """Time of one draft; 0 for no levels."""
        return _interpolate(self.draft[num_target_layers], num_levels) if num_levels else 0.0


@dataclass(frozen=True)
class CostTable:
    """Costs by number of sequences, interpolated linearly between the measured numbers."""

    by_rows: Mapping[int, Costs]
    _rows: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", sorted(self.by_rows))

    def verify_seconds(self, num_rows: int, num_tokens: int) -> float:
        """Time of one target pass over `num_tokens` tokens of each of `num_rows` sequences."""
        return self._at(num_rows, lambda costs: costs.verify_seconds(num_tokens))

    def draft_seconds(self, num_rows: int, num_levels: int, num_target_layers: int) -> float:
        """Time of drafting `num_levels` levels for `num_rows` sequences with this N; 0 for no levels."""
        return self._at(num_rows, lambda costs: costs.draft_seconds(num_levels, num_target_layers))

    def _at(self, num_rows: int, seconds_of: Callable[[Costs], float]) -> float:
        rows = self._rows
        index = min(bisect_left(rows, num_rows), len(rows) - 1)
        high = rows[index]
        if index == 0 or high <= num_rows:
            return seconds_of(self.by_rows[high])
        low = rows[index - 1]
        before, after = seconds_of(self.by_rows[low]), seconds_of(self.by_rows[high])
        return before + (after - before) * (num_rows - low) / (high - low)


def ascending(sizes: Sequence[int], seconds: Sequence[float]) -> Points:
    """Points of `Costs` from measured seconds, adjusted so that more work never takes less time.

    Other work on the machine can only add time, so the time of a larger size is an upper bound for all smaller sizes.
    """
    bounded = list(accumulate(reversed(seconds), min))
    return list(zip(sizes, reversed(bounded), strict=True))


def median_seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median time of `run` after one warm-up."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    return sorted(seconds)[_REPEATS // 2]


def growing_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `largest` itself."""
    sizes = {largest}
    power = 1
    while power <= largest:
        sizes |= {size for size in (power, power + power // 2) if size <= largest}
        power *= 2
    return sorted(sizes)


def _interpolate(points: Points, x: int) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (max(x, x0) - x0) / (x1 - x0)
    return points[-1][1]
