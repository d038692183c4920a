"""The engine's dealings with one draft source: how deep to draft, what the source has still to be told, and asking it.

Tokens are told late, just before a draft is wanted: what the planner does not want drafted costs nothing at all. Keys
and values are still in the cache then; hidden states, which are not kept there, each sequence keeps itself.
"""

import time
from collections.abc import Collection, Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moray.batch import Taps
from moray.decoding.batch_planner import NUM_TRIED, BatchPlanner
from moray.decoding.drafts import Ask, DraftSource
from moray.decoding.engine_stats import EngineStats
from moray.decoding.fitting import engine_notices, fit_shape
from moray.decoding.row_cache import RowCache
from moray.decoding.sequence import EngineSequence
from moray.targets.model import Target
from moray.trees.shapes import AnyShape
from moray.trees.tree import TokenTree

_AT_ONCE = 64
"""Tokens of one sequence that are told at once, where the source has to catch up."""
_FEW = 16
"""So many are told together with those of other sequences."""


class Drafting:
    """One draft source and the sequences that use it."""

    def __init__(
        self, name: str, source: DraftSource, shape: AnyShape, target: Target, cache: RowCache, stats: EngineStats
    ) -> None:
        """
        Raises:
            ConfigError: the source cannot draft such trees.
        """
        self.source = source
        self.observed = source.observed
        self.shape = fit_shape(shape, name, source.max_depth, target.spec.vocab_size)
        self.notices = engine_notices(shape, name, self.shape, source.efforts)
        """Warnings about settings that have no effect here; the engine's builder logs them."""
        self.planner = BatchPlanner(self.shape)
        self._target = target
        self._cache = cache
        self._stats = stats
        self._is_wanted = True
        """Whether the planner wanted drafts when it was last asked."""
        self._are_too_few = False
        """Whether it did, but not for those alone who had a drafter."""

    def expect(self, number: int, num_running: int) -> None:
        """A sequence, one of so many, begins; if drafts are likely to be wanted, the source may prepare."""
        if not self.planner.is_trying and self.planner.next_shape(num_running, num_running) is not None:
            self.source.open(number)

    def ask(self, running: list[EngineSequence], rows: list[int], num_rows: int) -> None:
        """Begin to draft for the sequences in some rows, for which no draft is under way; `num_rows` are in a pass."""
        wanted = [row for row in rows if running[row].asked is None]
        if not wanted:
            return
        shape = self.planner.next_shape(num_rows, len(wanted))
        self._is_wanted, self._are_too_few = shape is not None, False
        if shape is None:
            return
        if self.planner.is_trying:  # with those who have a drafter already, if there are any
            wanted.sort(key=lambda row: not self.source.can_draft(running[row].number))
            wanted = wanted[: max(0, NUM_TRIED - self._num_under_way(running))]
        for row in wanted:
            self.source.open(running[row].number)
        rows = [row for row in wanted if self.source.can_draft(running[row].number)]
        if len(rows) < len(wanted) and not self.planner.is_trying:  # a pass as deep may not be worth it for these alone
            shape = self.planner.next_shape(num_rows, len(rows))
            self._are_too_few = shape is None
        if not rows or shape is None:
            return
        unknown = {row: running[row].length - self.source.num_known(running[row].number) for row in rows}
        many = {row: count for row, count in unknown.items() if count > _FEW}
        self._tell_many(running, many)
        begin = time.perf_counter()
        self._tell_few(running, {row: count for row, count in unknown.items() if 0 < count <= _FEW})
        sequences = [running[row] for row in rows]
        self.source.ask([Ask(s.number, s.tokens[-1], s.length, shape, s.sampler) for s in sequences])
        if len(many) <= len(rows) // 8:  # what it takes to send whole prompts is no measure of what comes
            self.planner.record_ask(len(rows), time.perf_counter() - begin)
        for sequence in sequences:
            sequence.asked = shape.depth

    def collect(self, running: list[EngineSequence], rows: list[int]) -> dict[int, TokenTree]:
        """The drafts asked for, by row; those that did not come in time are missing."""
        has_rows, rows = bool(rows), [row for row in rows if running[row].asked is not None]
        if not rows:
            if has_rows and not self._num_under_way(running):
                if not self._is_wanted:
                    self.planner.forget(len(running))
                elif self._are_too_few:
                    self.planner.fade(len(running))
            return {}
        begin = time.perf_counter()
        found = self.source.collect([running[row].number for row in rows])
        depth = max(running[row].asked or 0 for row in rows)
        self.planner.record_draft(len(rows), depth, time.perf_counter() - begin)
        self._stats.num_missed += len(rows) - len(found)
        for row in rows:
            running[row].asked = None
        num_vain = sum(tree.num_nodes == 1 for tree in found.values())  # the drafter had no idea
        if self.planner.is_trying:  # else it is the time that was waited that counts against the late ones
            num_vain += len(rows) - len(found)
        for _ in range(num_vain):
            self.planner.record(1, 0)  # as good as refused; the others are recorded once they are verified
        return {row: found[running[row].number] for row in rows if running[row].number in found}

    def _num_under_way(self, sequences: Iterable[EngineSequence]) -> int:
        return sum(sequence.drafting is self and sequence.asked is not None for sequence in sequences)

    def _tell_many(self, running: list[EngineSequence], unknown: dict[int, int]) -> None:
        """Hand over tokens in the cache that the source does not know yet, so many of each row, row by row."""
        with self._stats.timed("observe"):
            for row, count in unknown.items():
                for begin in range(0, count, _AT_ONCE):
                    self._observe(running, {row: min(_AT_ONCE, count - begin)})

    def _tell_few(self, running: list[EngineSequence], unknown: dict[int, int]) -> None:
        """The same, all rows together."""
        if unknown:
            with self._stats.timed("observe"):
                self._observe(running, unknown)

    def _observe(self, running: list[EngineSequence], counts: dict[int, int]) -> None:
        """Hand over the next so many tokens of the sequences in some rows, which are padded to equally many."""
        source, needs = self.source, self.observed
        sequences = {row: running[row] for row in counts}
        begins = {row: source.num_known(sequence.number) for row, sequence in sequences.items()}
        kv = None
        if needs.kv_layers:  # behind a shorter one's tokens stands what nobody reads
            kv = self._cache.flat([*counts], [*begins.values()], max(counts.values()), needs.kv_layers)
        hidden = {depth: _hidden(sequences, counts, depth) for depth in needs.hidden_depths}
        memory = source.observe(Taps(kv, hidden))
        for index, (row, sequence) in enumerate(sequences.items()):
            begin, count = begins[row], counts[row]
            tokens = torch.tensor(sequence.tokens[begin : begin + count], device=self._target.device)
            own = {name: tensor[index : index + 1, :count] for name, tensor in memory.items()}
            source.extend(sequence.number, tokens, own, min(sequence.num_kept, count))
            sequence.num_kept = 0


def ask_all(
    draftings: Iterable[Drafting], sequences: list[EngineSequence], rows: Collection[int], num_rows: int
) -> None:
    """Let drafts begin, each with its own drafter: those who draft elsewhere need not wait for the next pass."""
    for drafting in draftings:
        drafting.ask(sequences, [row for row in rows if sequences[row].drafting is drafting], num_rows)


def collect_all(
    draftings: Iterable[Drafting], sequences: list[EngineSequence], rows: Collection[int]
) -> dict[int, TokenTree]:
    """The drafts asked for, of all drafters, by row."""
    found: dict[int, TokenTree] = {}
    for drafting in draftings:
        found |= drafting.collect(sequences, [row for row in rows if sequences[row].drafting is drafting])
    return found


def awaits_first_draft(sequence: EngineSequence, most_cycles: int) -> bool:
    """Whether a sequence that has begun should wait for its first draft: in a cycle now it would make others wait, for
    the draft stands in line behind theirs. Drafts are made in the order in which they are asked for: after one cycle of
    all others it is there, or late."""
    drafting, is_asked = sequence.drafting, sequence.asked is not None
    if drafting is None or not is_asked or sequence.num_passed_over >= most_cycles:
        return False
    return drafting.source.is_under_way(sequence.number)


def _hidden(
    sequences: dict[int, EngineSequence], counts: dict[int, int], depth: int
) -> Float[Tensor, "rows most hidden"]:
    kept = [sequence.take_hidden(depth, counts[row]) for row, sequence in sequences.items()]
    return pad_sequence(kept, batch_first=True)
