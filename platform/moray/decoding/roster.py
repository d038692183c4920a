"""Which sequences wait, which have a row, and which row: first come, first served, and no gaps.

    row 0 .. r-1         running, their prompts read
    row r .. r+p-1       reading their prompts
    behind them          free

A sequence is admitted once there are slots for all that it may come to, so none has ever to be put out again.
"""

from collections import deque
from collections.abc import Collection

from moray.decoding.row_cache import GRAIN, RowCache
from moray.decoding.sequence import EngineSequence


class Roster:
    """Keeps a `RowCache`'s rows in step with the sequences that they belong to."""

    def __init__(self, cache: RowCache, max_sequences: int, most_nodes: int) -> None:
        """`most_nodes` are those of the largest tree, its root among them, which need slots behind a sequence."""
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.reading: list[EngineSequence] = []
        self._cache = cache
        self._max_sequences = max_sequences
        self._most_nodes = most_nodes

    @property
    def num_held(self) -> int:
        """Sequences that have a row."""
        return len(self.running) + len(self.reading)

    @property
    def held(self) -> list[EngineSequence]:
        """Them, by row."""
        return [*self.running, *self.reading]

    @property
    def used_share(self) -> float:
        """Of all slots, those of rows in use."""
        return self.num_held * self._cache.width / self._cache.num_slots

    def admit(self) -> list[EngineSequence]:
        """Let those in line begin to read as long as there are slots for them; returns who that is."""
        chosen: list[EngineSequence] = []
        width = max(map(self._width, self.held), default=0)
        while self.waiting and self.num_held + len(chosen) < self._max_sequences:
            wider = max(width, self._width(self.waiting[0]))
            if (self.num_held + len(chosen) + 1) * wider > self._cache.num_slots:
                break
            width = wider
            chosen.append(self.waiting.popleft())
        if chosen and (width > self._cache.width or self.num_held + len(chosen) > self._cache.num_rows):
            self._cache.arrange(width, self.num_held, self._num_used_slots)
        self.reading += chosen
        return chosen

    def settle(self, gone: Collection[int] = (), begun: Collection[int] = ()) -> None:
        """Close the gaps of those that are gone, and let those begin to run whose prompts have been read."""
        before, num_slots = self.held, self._num_used_slots
        running = [s for s in self.running if s.number not in gone] + [s for s in self.reading if s.number in begun]
        reading = [s for s in self.reading if s.number not in gone and s.number not in begun]
        rows = {sequence.number: row for row, sequence in enumerate(before)}
        self.running, self.reading = _placed(running, 0, rows), _placed(reading, len(running), rows)
        moves = {rows[s.number]: row for row, s in enumerate(self.held) if rows[s.number] != row}
        self._cache.reorder(moves, num_slots)

    def _width(self, sequence: EngineSequence) -> int:
        return -(-(sequence.need + self._most_nodes) // GRAIN) * GRAIN

    @property
    def _num_used_slots(self) -> int:
        """Of the longest sequence."""
        return max((*(s.length for s in self.running), *(s.num_read for s in self.reading)), default=0)


def _placed(sequences: list[EngineSequence], first: int, rows: dict[int, int]) -> list[EngineSequence]:
    """Sequences in an order that leaves as many as possible in the rows that they have."""
    places = range(first, first + len(sequences))
    placed = {rows[s.number]: s for s in sequences if rows[s.number] in places}
    others = iter([s for s in sequences if rows[s.number] not in places])
    return [placed[place] if place in placed else next(others) for place in places]
