"""How often drafts of each N are accepted, level by level: what the next draft can expect.

    P(refused at level k | N) = refusals(N) * ratio(k)

refusals(N): share of the levels reached by drafts of N that were refused, over about 200 drafts, because it compares
values of N. ratio(k): actual refusals at level k divided by expected ones, over about 30 cycles and all drafts, so
that all values of N follow the text together. When values of N are compared, each gets the benefit of the doubt, so
that one not tried for a long time is tried again: discounted UCB (arXiv 0805.3415), here on refusals.

This module knows nothing of what drafts cost.
"""

from collections.abc import Sequence

DECAY = 0.97
"""Factor on the weight of a cycle for every cycle after it: about the last 30 count."""
_PRIOR_WEIGHT = 6.0
"""Weight, in drafts, of the prior for a level never tried, or not tried for a long time, so that it is tried again.
With 2, two refusals at the start of an answer halve the estimate, from 0.7 to 0.35 (docs/results/decoding.md)."""
_PRIOR_REFUSALS = 0.3
_DECAY_LAYER_COUNT = 0.995
"""Like `DECAY`, for comparing values of N: their differences are smaller than the noise of 30 cycles, and last
longer."""
_PRIOR_LEVELS = 20.0
"""Weight, in levels, of the average over all values of N against those of one N: about four of its drafts."""
_DOUBT = 0.5
"""Up to this share is taken off the refusals of an N while little is known of it."""


class _LayerCount:
    """Counts for the drafts of one N."""

    def __init__(self) -> None:
        self.reached = self.refused = 0.0

    def decay(self) -> None:
        self.reached *= _DECAY_LAYER_COUNT
        self.refused *= _DECAY_LAYER_COUNT


class Acceptance:
    """Running acceptance rates of one drafter."""

    def __init__(self, num_levels: int, layer_counts: Sequence[int]) -> None:
        self._layer_counts = {num_target_layers: _LayerCount() for num_target_layers in layer_counts}
        self._expected = [0.0] * num_levels
        self._refused = [0.0] * num_levels

    def rates(self, num_target_layers: int, *, in_doubt: bool = False) -> list[float]:
        """P(level k is accepted | level k - 1 was); a level without evidence is taken to be like the one before.

        `in_doubt` gives N the benefit of the doubt: the less is known of it, the more.
        """
        refusals = self._refusals(num_target_layers) * (1.0 - (self._doubt(num_target_layers) if in_doubt else 0.0))
        return [max(0.0, 1.0 - refusals * ratio) for ratio in self._level_ratios()]

    def record(self, num_target_layers: int, num_levels: int, num_accepted: int, cycles: float = 1.0) -> None:
        """Record the result of a draft: levels verified, and how many of them were accepted.

        Earlier results age by this many `cycles`: by a fraction of one if the pass verified several drafts.
        """
        expected, own = self._refusals(num_target_layers), self._layer_counts[num_target_layers]
        for each in self._layer_counts.values():
            each.decay()
        decay = DECAY**cycles
        for level in range(len(self._expected)):
            self._expected[level] *= decay
            self._refused[level] *= decay
            if level < num_levels and level <= num_accepted:
                self._expected[level] += expected
                self._refused[level] += level == num_accepted
                own.reached += 1.0
                own.refused += level == num_accepted

    def _refusals(self, num_target_layers: int) -> float:
        """Share of the levels reached that were refused; close to the average over all N while little is known of this
        one."""
        if len(self._layer_counts) == 1:  # nothing to compare: `_level_ratios` covers it
            return _PRIOR_REFUSALS
        of_all = (sum(each.refused for each in self._layer_counts.values()) + _PRIOR_WEIGHT * _PRIOR_REFUSALS) / (
            sum(each.reached for each in self._layer_counts.values()) + _PRIOR_WEIGHT
        )
        own = self._layer_counts[num_target_layers]
        return (own.refused + _PRIOR_LEVELS * of_all) / (own.reached + _PRIOR_LEVELS)

    def _doubt(self, num_target_layers: int) -> float:
        """By what share its refusals may really be lower: the relative standard error of a count n is 1 / sqrt(n)."""
        return (
            0.0
            if len(self._layer_counts) == 1
            else _DOUBT / (1.0 + self._layer_counts[num_target_layers].refused) ** 0.5
        )

    def _level_ratios(self) -> list[float]:
        ratios, belief = [], 1.0
        weight = _PRIOR_WEIGHT * _PRIOR_REFUSALS
        for expected, refused in zip(self._expected, self._refused, strict=True):
            belief = (refused + weight * belief) / (expected + weight)
            ratios.append(belief)
        return ratios
