"""Several sequences with a drafter, in lock step: one target pass per cycle verifies the trees of all of them.

For measuring what speculation is worth at a given batch size. What an answer is does not depend on its neighbours,
as in `continuous`, which is the same without a drafter. Drafts are made one sequence after the other, for a drafting
state belongs to one sequence; everything else is done for all rows at once.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from moray.batch import Taps
from moray.decoding.accept import accept_rows
from moray.decoding.params import SamplingParams
from moray.decoding.prompts import PREFILL_TOKENS, is_worth_a_pass, read_together
from moray.decoding.row_cache import GRAIN, RowCache
from moray.decoding.sampling import Sampler
from moray.decoding.speculate import check_shape
from moray.decoding.stats import Generation
from moray.decoding.stop import Ending, StopStrings, longest_answer
from moray.drafters.base import Drafter
from moray.errors import ConfigError, DataError
from moray.targets.model import Target, TargetOutput
from moray.trees.shapes import ChainShape, GrowableShape
from moray.trees.stack import stack_trees
from moray.trees.tree import TokenTree


@dataclass
class _Sequence:
    """One prompt, its answer so far, and the drafting state that it has while it runs."""

    prompt: list[int]
    sampler: Sampler
    ending: Ending
    generation: Generation
    state: object = None
    began: float = 0.0

    @property
    def length(self) -> int:
        """Tokens in the cache: all but the last emitted one, the next root, whose position this therefore is."""
        return len(self.prompt) + len(self.generation.tokens) - 1


class LockstepDecoder:
    """Target and drafter in one process, for up to `batch` sequences at a time; a finished one's row goes to the next.

    The running sequences fill the rows 0..n-1 of a `RowCache` without a gap, so no pass is made over an idle row.
    """

    def __init__(self, target: Target, drafter: Drafter, shape: GrowableShape, capacity: int, batch: int) -> None:
        """
        Args:
            target: may be shared.
            drafter: may be shared; this decoder has `batch` drafting states of its own.
            shape: of the trees.
            capacity: most tokens of prompt and answer together, of each sequence.
            batch: most sequences that run at the same time.

        Raises:
            ConfigError: the shape does not go with the vocabulary or the drafter, or `batch` is below 1.
            DataError: the target's context is shorter than `capacity`.
        """
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be at least 1")
        if capacity > target.spec.max_positions:
            raise DataError(
                f"a context of {capacity} tokens was asked for; the target's is {target.spec.max_positions}"
            )
        check_shape(shape, drafter)
        self.target, self.drafter, self.shape = target, drafter, shape
        self.capacity, self.batch = capacity, batch
        width = -(-(capacity + shape.num_nodes + 1) // GRAIN) * GRAIN
        self.num_passes = 0
        """Verify passes made so far, over all generations."""
        self._cache = RowCache(target, batch * width)
        self._cache.arrange(width, 0, 0)
        self._slots = torch.arange(width, device=target.device)
        self._states = [drafter.new_state(capacity, shape.num_expanded) for _ in range(batch)]
        self._free: list[object] = []
        self._running: list[_Sequence] = []

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        *,
        stop: StopStrings | None = None,
        sequences: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Answer prompts, each as `PlainDecoder` would alone; as many as there are rows at a time, in order.

        A generation's seconds are those that it ran, whoever else did; its phases are its equal share of those of
        the cycles that it took part in, so that they add up to what all took.

        Args:
            prompts: any number.
            params: greedy, or how tokens are drawn.
            max_new_tokens: most tokens of one answer.
            eos_ids: tokens that end an answer.
            stop: texts that end an answer.
            sequences: numbers that name the prompts' noise, as in plain decoding; 0, 1, 2... if left out.

        Raises:
            DataError: a prompt is empty or leaves no room in the context, or `max_new_tokens` is below 1.
        """
        waiting = self._sequences(prompts, params, max_new_tokens, eos_ids, stop, sequences)
        generations = [sequence.generation for sequence in waiting]
        self._running, self._free = [], self._states[:]
        while waiting or self._running:
            count = min(len(self._free), len(waiting))
            if is_worth_a_pass(count, len(self._running), len(waiting)):
                self._admit(waiting[:count])
                waiting = waiting[count:]
            self._close()
            if self._running:
                self._cycle()
                self._close()
        return generations

    def _sequences(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        max_new_tokens: int,
        eos_ids: Collection[int],
        stop: StopStrings | None,
        numbers: Sequence[int] | None,
    ) -> list[_Sequence]:
        made: list[_Sequence] = []
        for prompt, number in zip(prompts, range(len(prompts)) if numbers is None else numbers, strict=True):
            if not 0 < len(prompt) < self.capacity:
                raise DataError(
                    f"a prompt has {len(prompt)} tokens; this context of {self.capacity} takes 1 to {self.capacity - 1}"
                )
            sampler = Sampler(params, self.target.spec.vocab_size, self.target.device, number)
            ending = Ending(longest_answer(max_new_tokens, self.capacity - len(prompt)), eos_ids, stop)
            made.append(_Sequence(prompt, sampler, ending, Generation([])))
        return made

    # --- One cycle ---

    def _cycle(self) -> None:
        """Propose, verify, accept, commit and observe for all running sequences.

        Waits for the device once where acceptance is by choice (see `decoding.accept`), drafting apart.
        """
        running = self._running
        roots = self._to_device([[sequence.generation.tokens[-1]] for sequence in running])
        with self._timed("propose"):
            trees = [self._propose(sequence, root) for sequence, root in zip(running, roots, strict=True)]
        with self._timed("verify"):
            output = self._verify(trees)
            logits = self.target.logits(output.last)
            self.num_passes += 1
        with self._timed("accept"):
            begins = [sequence.length for sequence in running]
            results = accept_rows(trees, logits, [sequence.sampler for sequence in running], begins)
            for sequence, tree, result in zip(running, trees, results, strict=True):
                emitted = sequence.ending.cut([*result.tokens, result.next_token])
                sequence.generation.accepted.append(len(result.path))
                sequence.generation.emitted.append(len(emitted))
                sequence.generation.drafted.append(tree.num_levels)
        going = [row for row, sequence in enumerate(running) if sequence.ending.finish_reason is None]
        if going:
            kept = [[0, *results[row].path] for row in going]
            with self._timed("commit"):
                taps = self._commit(going, [begins[row] for row in going], kept, output)
            with self._timed("observe"):
                tokens = self._to_device([[running[row].generation.tokens[-1], *results[row].tokens] for row in going])
                counts = [trees[row].num_kept(len(results[row].path)) for row in going]
                self._observe([running[row] for row in going], tokens, [len(path) for path in kept], taps, counts)
        for sequence, result in zip(running, results, strict=True):
            end = sequence.generation.emitted[-1]
            sequence.generation.tokens.extend([*result.tokens, result.next_token][:end])

    def _propose(self, sequence: _Sequence, root: Int[Tensor, " 1"]) -> TokenTree:
        shape = self.shape
        select = sequence.sampler.selector(sequence.length, shape.depth, isinstance(shape, ChainShape))
        return self.drafter.propose(sequence.state, root, shape, select)

    def _verify(self, trees: list[TokenTree]) -> TargetOutput:
        """One pass over all trees, those with fewer nodes padded; a row's nodes go behind its committed slots.

        slots of row 0   a  b  c  d | root x  y  .          its nodes see a to d, and their ancestors
        slots of row 1   e  f | root z  w  v  .  .          padding sees itself, and nobody sees it
        """
        stack = stack_trees(trees)
        most = stack.num_nodes
        lengths = self._to_device([[sequence.length] for sequence in self._running])
        slots = lengths + self._slots[:most]
        longest = max(sequence.length for sequence in self._running) + most
        num_seen = min(-(-longest // 16) * 16, self._cache.width)  # few different shapes, and aligned ones
        self._cache.aim(slots, num_seen)
        committed = (self._slots[:num_seen] < lengths)[:, None].repeat(1, most, 1)
        mask = committed.scatter_(2, slots[:, None].expand(-1, most, -1), stack.ancestors)[:, None]
        depths = self.drafter.observed.hidden_depths
        return self.target.forward(stack.tokens, lengths + stack.depths, mask, self._cache, depths)

    def _commit(self, rows: list[int], begins: list[int], kept: list[list[int]], output: TargetOutput) -> Taps:
        """Keep root and accepted path of each row; returns their taps, padded with those of the next nodes."""
        most = max(map(len, kept))
        # Behind a path, slots keep what they hold: nobody looks there before it is written anew.
        nodes = [path + list(range(len(path), most)) for path in kept]
        host = [[row, begin, *path] for row, begin, path in zip(rows, begins, nodes, strict=True)]
        row, begin, node = torch.tensor(host, device=self.target.device).split([1, 1, most], dim=1)
        places = begin + self._slots[:most]
        if any(path[-1] != most - 1 for path in nodes):
            self._cache.move(row[:, 0], begin + node, places)
        needs = self.drafter.observed
        kv = self._cache.flat(row[:, 0], places, needs.kv_layers) if needs.kv_layers else None
        return Taps(kv, {depth: hidden[row, node] for depth, hidden in output.hidden.items()})

    def _observe(
        self,
        sequences: list[_Sequence],
        tokens: Int[Tensor, "rows new"],
        counts: list[int],
        taps: Taps,
        num_kept: list[int],
    ) -> None:
        """Append to each row's drafting state its first `counts` tokens and what is observed of them."""
        memory = self.drafter.observe(taps)
        for row, sequence in enumerate(sequences):
            count = counts[row]
            own = {name: tensor[row : row + 1, :count] for name, tensor in memory.items()}
            self.drafter.extend(sequence.state, tokens[row, :count], own, num_kept[row])

    # --- Who runs ---

    def _admit(self, new: list[_Sequence]) -> None:
        """Read prompts into the rows behind the running ones; their first tokens are chosen."""
        new = sorted(new, key=lambda sequence: -len(sequence.prompt))
        while new:
            count = max(1, PREFILL_TOKENS // len(new[0].prompt))
            self._prefill(new[:count])
            new = new[count:]

    def _prefill(self, new: list[_Sequence]) -> None:
        begin = time.perf_counter()
        for sequence in new:
            sequence.state = self._free.pop()
            self.drafter.reset(sequence.state)

        def observe(start: int, tokens: Int[Tensor, "prompts new"], taps: Taps) -> None:
            left = [len(sequence.prompt) - start for sequence in new]
            rows = [row for row, count in enumerate(left) if count > 0]  # the longest prompts, which come first
            counts = [min(left[row], tokens.shape[1]) for row in rows]
            self._observe([new[row] for row in rows], tokens[: len(rows)], counts, taps, [0] * len(rows))

        prompts = [sequence.prompt for sequence in new]
        cache, last, _ = read_together(self.target, prompts, self.drafter.observed, observe)
        self._cache.fill(len(self._running), cache)
        logits = self.target.logits(last)
        chosen = [s.sampler.choose(logits[row : row + 1], len(s.prompt)) for row, s in enumerate(new)]
        tokens = torch.cat(chosen).tolist()
        now = time.perf_counter()
        for sequence, token in zip(new, tokens, strict=True):
            sequence.generation.tokens.extend(sequence.ending.cut([token]))
            sequence.generation.prefill_seconds = (now - begin) / len(new)
            sequence.began = now
        self._running += new

    def _close(self) -> None:
        """Take leave of those that have ended; the last ones move up into their rows."""
        ended = {row for row, sequence in enumerate(self._running) if sequence.ending.finish_reason is not None}
        if not ended:
            return
        for row in ended:
            sequence = self._running[row]
            sequence.generation.finish_reason = sequence.ending.finish_reason or ""
            sequence.generation.seconds = time.perf_counter() - sequence.began
            self._free.append(sequence.state)
        longest = max(sequence.length for sequence in self._running)
        order = self._cache.close(ended, len(self._running), min(longest, self._cache.width))
        self._running = [self._running[row] for row in order]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        share = (time.perf_counter() - begin) / len(self._running)
        for sequence in self._running:
            sequence.generation.phases[phase] += share

    def _to_device(self, rows: list[list[int]]) -> Int[Tensor, "rows most"]:
        most = max(map(len, rows))
        return torch.tensor([row + [0] * (most - len(row)) for row in rows], device=self.target.device)
