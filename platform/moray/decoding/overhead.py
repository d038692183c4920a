"""What each ask for drafts costs besides the drafts, by how many rows it is for: the average of what it took lately.

As a mean per row, with asks for single ones among them, it would be believed to be twice what it is for many.
"""

from moray.decoding.acceptance import FORGET

_MEMORY = 8.0
"""Times over which it is averaged."""
_HICCUP = 2.0
"""What took longer than so many times the average counts for no more."""


class Overhead:
    """Seconds by the bits of the number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._is_old = False
        """Whether all of them are from before the last pause."""

    def record(self, num_rows: int, seconds: float) -> None:
        """It took so long for so many rows; the first time after a pause says more than all before."""
        if self._is_old:
            self._seconds, self._is_old = {}, False
        size = num_rows.bit_length()
        known = self._seconds.setdefault(size, seconds)
        self._seconds[size] += (min(seconds, _HICCUP * known) - known) / _MEMORY

    def seconds(self, num_rows: int) -> float:
        """For so many rows: as for the most similar number lately, or none."""
        size = num_rows.bit_length()
        return self._seconds[min(self._seconds, key=lambda known: abs(known - size))] if self._seconds else 0.0

    def pause(self) -> None:
        """There will be none for a while."""
        self._is_old = True

    def fade(self) -> None:
        """A cycle has passed without any: what is not tried for long is believed to be nothing."""
        self._seconds = {size: FORGET * seconds for size, seconds in self._seconds.items()}
