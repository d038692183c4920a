"""Decides which sequences wait and which row each of the others has: first come, first served, without gaps.

    row 0 .. r-1         running: verified in cycles
    row r .. r+b-1       starting: prompt read, first draft under way; or waiting for a client's tree
    row r+b .. r+b+p-1   reading their prompts
    after them           free

A sequence is admitted once there are slots for its maximum length, so that none is ever preempted.
"""

from collections import deque
from collections.abc import Collection
from itertools import islice

from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.kv_cache import GRAIN, BatchedKVCache
from moray.decoding.engine.sequence import EngineSequence
from moray.errors import ConfigError

_GATHER_SHARE = 16


class Scheduler:
    """Keeps the rows of a `BatchedKVCache` in step with the sequences that own them."""

    def __init__(self, cache: BatchedKVCache, config: EngineConfig, max_nodes: int) -> None:
        """`max_nodes` is the size of the largest tree, root included; it needs that many slots after a sequence."""
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.starting: list[EngineSequence] = []
        self.reading: list[EngineSequence] = []
        self._cache = cache
        self._config = config
        self._max_nodes = max_nodes
        self._is_second = True

    @property
    def num_active(self) -> int:
        """Sequences that have a row."""
        return len(self.running) + len(self.starting) + len(self.reading)

    @property
    def decoding(self) -> list[EngineSequence]:
        """Sequences whose prompts have been read, by row."""
        return [*self.running, *self.starting]

    @property
    def active(self) -> list[EngineSequence]:
        """All sequences that have a row, by row."""
        return [*self.decoding, *self.reading]

    @property
    def used_share(self) -> float:
        """Share of all slots that belongs to rows in use."""
        return self.num_active * self._cache.width / self._cache.num_slots

    def admit(self) -> list[EngineSequence]:
        """Admit waiting sequences as long as there are slots for them; return those admitted."""
        width, count = self._fitting()
        if self._config.batch_admissions and count < min(len(self.running) // _GATHER_SHARE, len(self.waiting)):
            return []
        chosen = [self.waiting.popleft() for _ in range(count)]
        if chosen and (width > self._cache.width or self.num_active + len(chosen) > self._cache.num_rows):
            self._cache.arrange(width, self.num_active, self._num_used_slots)
        self.reading += chosen
        return chosen

    def next_group(self) -> range:
        """Rows of the next micro-batch: all rows, or the first half and the second half in turn."""
        count = len(self.running)
        if self._config.num_micro_batches == 1 or count == 1:
            return range(count)
        half = (count + 1) // 2
        self._is_second = not self._is_second
        return range(half, count) if self._is_second else range(half)

    def _fitting(self) -> tuple[int, int]:
        """Row width that the sequences which can be admitted need, and how many they are."""
        width, count = max(map(self._width, self.active), default=0), 0
        for sequence in islice(self.waiting, self._config.max_num_seqs - self.num_active):
            wider = max(width, self._width(sequence))
            if (self.num_active + count + 1) * wider > self._cache.num_slots:
                break
            width, count = wider, count + 1
        return width, count

    @property
    def can_admit(self) -> bool:
        """Whether there is a row for a waiting sequence."""
        return self._fitting()[1] > 0

    def update_rows(
        self,
        released: Collection[int] = (),
        begun: Collection[int] = (),
        joined: Collection[int] = (),
        parked: Collection[int] = (),
    ) -> None:
        """Take the sequences in `released` out of their rows and close the gaps; move those in `begun` from reading to
        starting, those in `joined` from starting to running, and those in `parked` back."""
        before, num_slots = self.active, self._num_used_slots
        left = [[s for s in part if s.number not in released] for part in (self.running, self.starting, self.reading)]
        running = [s for s in left[0] if s.number not in parked] + [s for s in left[1] if s.number in joined]
        starting = [s for s in left[0] if s.number in parked] + [s for s in left[1] if s.number not in joined]
        starting += [s for s in left[2] if s.number in begun]
        reading = [s for s in left[2] if s.number not in begun]
        rows = {sequence.number: row for row, sequence in enumerate(before)}
        self.running = _placed(running, 0, rows)
        self.starting = _placed(starting, len(running), rows)
        self.reading = _placed(reading, len(running) + len(starting), rows)
        moves = {rows[s.number]: row for row, s in enumerate(self.active) if rows[s.number] != row}
        self._cache.reorder(moves, num_slots)

    def _width(self, sequence: EngineSequence) -> int:
        return -(-(sequence.need + self._max_nodes) // GRAIN) * GRAIN

    @property
    def _num_used_slots(self) -> int:
        """Slots that the longest sequence has filled."""
        return max((*(s.length for s in self.decoding), *(s.num_read for s in self.reading)), default=0)


def longest_sequence(config: EngineConfig, max_positions: int, num_slots: int, max_nodes: int) -> int:
    """Maximum number of tokens of prompt and answer together.

    Args:
        config: limits of the engine.
        max_positions: the target's context.
        num_slots: of the KV cache.
        max_nodes: size of the largest tree, root included.

    Raises:
        ConfigError: more is configured than there is room for.
    """
    longest = min(max_positions, num_slots - max_nodes)
    if longest < max(1, config.max_model_len or 1):
        raise ConfigError(
            f"engine.max_model_len is {config.max_model_len}, but the target's context is {max_positions}, and "
            f"engine.kv_cache_tokens {config.kv_cache_tokens} less a tree of {max_nodes} nodes: give a lower "
            "engine.max_model_len or more engine.kv_cache_tokens"
        )
    return config.max_model_len or longest


def _placed(sequences: list[EngineSequence], first: int, rows: dict[int, int]) -> list[EngineSequence]:
    """Order sequences so that as many as possible stay in their rows."""
    wanted = range(first, first + len(sequences))
    placed = {rows[s.number]: s for s in sequences if rows[s.number] in wanted}
    others = iter([s for s in sequences if rows[s.number] not in wanted])
    return [placed[row] if row in placed else next(others) for row in wanted]
