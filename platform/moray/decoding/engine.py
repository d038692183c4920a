"""Answers many sequences at once, with drafts or without: continuous batching of speculative decoding.

    step  = admit waiting sequences + read a chunk of prompts + one cycle of all running sequences
    cycle = propose (here or elsewhere) + one target pass over the trees of all + accept + commit + observe

What an answer is does not depend on its neighbours: greedy it is the target's own, sampled its noise is a function of
seed, sequence and position, as in `speculate.PlainDecoder`. In low precision near ties may fall otherwise.

The engine knows neither Ray nor HTTP, and of drafters only that somebody drafts (`decoding.drafts`).
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moray.decoding.accept import Accepted, accept_rows
from moray.decoding.drafting import Drafting
from moray.decoding.drafts import DraftSource
from moray.decoding.engine_config import EngineConfig
from moray.decoding.engine_stats import EngineStats
from moray.decoding.request import Request, TokenLogprobs, Update
from moray.decoding.row_cache import GRAIN, RowCache
from moray.decoding.sequence import EngineSequence
from moray.decoding.stop import Decode
from moray.errors import DataError
from moray.targets.model import Target, TargetOutput
from moray.trees.grow import root_alone
from moray.trees.stack import stack_trees
from moray.trees.tree import TokenTree

_SEEN_GRAIN = 16
"""A pass looks at a multiple of so many slots: few different shapes, and aligned ones."""


class Engine:
    """Target, key/value memory and the sequences that it holds.

    Running sequences fill rows 0..n-1 of a `RowCache`, those whose prompts are being read the rows behind them, all
    without a gap: no pass is made over an idle row.
    """

    def __init__(
        self,
        target: Target,
        config: EngineConfig,
        eos_ids: Collection[int],
        *,
        drafts: Mapping[str, DraftSource] | None = None,
        decode: Decode | None = None,
    ) -> None:
        """
        Args:
            target: may be shared.
            config: limits.
            eos_ids: tokens that end an answer.
            drafts: sources by name, of which requests choose; the first is the default. None at all: plain decoding.
            decode: the tokenizer's, for stop strings.
        """
        self.target = target
        self.config = config
        self.stats = EngineStats()
        self._cache = RowCache(target, -(-config.kv_tokens // GRAIN) * GRAIN)
        self.drafting = {
            name: Drafting(source, config.tree, target, self._cache, self.stats)
            for name, source in (drafts or {}).items()
        }
        self._most_nodes = 1 + max((drafting.shape.num_nodes for drafting in self.drafting.values()), default=0)
        self._hidden_depths = sorted({d for each in self.drafting.values() for d in each.observed.hidden_depths})
        self._eos_ids = frozenset(eos_ids)
        self._decode = decode
        longest = min(target.spec.max_positions, self._cache.num_slots - self._most_nodes)
        self.capacity = min(longest, config.capacity or longest)
        """Most tokens of prompt and answer together."""
        self._num_submitted = 0
        self._waiting: deque[EngineSequence] = deque()
        self._running: list[EngineSequence] = []
        self._reading: list[EngineSequence] = []
        self._updates: list[Update] = []
        self._is_second = True

    # --- What callers do ---

    def submit(self, request: Request) -> int:
        """Put a request in line; returns its number.

        Raises:
            DataError: naming what of the request cannot be served.
        """
        spec, num_prompt = self.target.spec, len(request.prompt)
        if num_prompt + request.max_new_tokens > self.capacity:
            raise DataError(
                f"the prompt has {num_prompt} tokens and max_new_tokens is {request.max_new_tokens}; both together "
                f"may be {self.capacity}"
            )
        known = (*request.prompt, *request.generated, *request.logit_bias)
        strange = [token for token in known if not 0 <= token < spec.vocab_size]
        if strange:
            raise DataError(f"token {strange[0]} is not in the vocabulary, which has {spec.vocab_size}")
        if request.drafter and request.drafter not in self.drafting:
            raise DataError(
                f"drafter is '{request.drafter}'; there are {', '.join(self.drafting) or 'none'}: name one, or None"
            )
        number = self._num_submitted
        self._num_submitted += 1
        device = self.target.device
        sequence = EngineSequence(number, request, spec.vocab_size, device, self._eos_ids, self._decode)
        if request.drafter is not None:
            sequence.drafting = self.drafting.get(request.drafter or next(iter(self.drafting), ""))
        if sequence.ending.finish_reason is not None:
            self._updates.append(Update(number, [], finish_reason=sequence.ending.finish_reason))
        else:
            self._waiting.append(sequence)
        return number

    def cancel(self, number: int) -> None:
        """Forget a sequence, wherever it is; one that has ended is forgotten already."""
        for sequence in self._waiting:
            if sequence.number == number:
                self._waiting.remove(sequence)
                return
        if any(sequence.number == number for sequence in (*self._running, *self._reading)):
            self._settle({number})

    @property
    def is_busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._waiting or self._running or self._reading or self._updates)

    @property
    def num_running(self) -> int:
        """Sequences that hold rows."""
        return len(self._running) + len(self._reading)

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return len(self._waiting)

    @property
    def kv_used(self) -> float:
        """Share of the key/value memory that is set aside for sequences."""
        return self.num_running * self._cache.width / self._cache.num_slots

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One chunk of prompts and one cycle; returns what has been added to answers, and which have ended."""
        self.stats.num_steps += 1
        with self.stats.timed("admit"):
            self._admit()
        if self._reading:
            with self.stats.timed("prefill"):
                self._read()
        if self._running:
            self._cycle()
        updates, self._updates = self._updates, []
        ended = {update.number for update in updates if update.finish_reason is not None}
        if ended:
            self._settle(ended)
        return updates

    # --- Who runs ---

    def _admit(self) -> None:
        """Let those in line begin, first come first served, as long as there is memory for all they may come to."""
        chosen: list[EngineSequence] = []
        width = max((self._width(sequence) for sequence in (*self._running, *self._reading)), default=0)
        while self._waiting and self.num_running + len(chosen) < self.config.max_sequences:
            wider = max(width, self._width(self._waiting[0]))
            if (self.num_running + len(chosen) + 1) * wider > self._cache.num_slots:
                break
            width = wider
            chosen.append(self._waiting.popleft())
            if chosen[-1].drafting is not None:
                chosen[-1].drafting.expect(chosen[-1].number, self.num_running)
        if not chosen:
            return
        if width > self._cache.width or self.num_running + len(chosen) > self._cache.num_rows:
            self._cache.arrange(width, self.num_running, self._held)
        self._reading += chosen

    def _width(self, sequence: EngineSequence) -> int:
        return -(-(sequence.need + self._most_nodes) // GRAIN) * GRAIN

    @property
    def _held(self) -> int:
        """Slots of the longest sequence that are in use."""
        return max((*(s.length for s in self._running), *(s.num_read for s in self._reading)), default=0)

    def _settle(self, gone: Collection[int] = (), begun: Collection[int] = ()) -> None:
        """Close the gaps of those that are gone, and let those begin to run whose prompts have been read."""
        before = [*self._running, *self._reading]
        held = self._held
        for sequence in before:
            if sequence.number in gone and sequence.drafting is not None:
                sequence.drafting.source.close(sequence.number)
        running = [s for s in self._running if s.number not in gone] + [s for s in self._reading if s.number in begun]
        reading = [s for s in self._reading if s.number not in gone and s.number not in begun]
        rows = {sequence.number: row for row, sequence in enumerate(before)}
        self._running, self._reading = _placed(running, 0, rows), _placed(reading, len(running), rows)
        after = [*self._running, *self._reading]
        moves = {rows[sequence.number]: row for row, sequence in enumerate(after) if rows[sequence.number] != row}
        self._cache.reorder(moves, held)

    # --- Prompts ---

    def _read(self) -> None:
        """Read the next chunk of every prompt in line; choose the first token where that was its last."""
        first, reading = len(self._running), self._reading
        left = [len(sequence.tokens) - sequence.num_read for sequence in reading]
        new = min(max(1, self.config.prefill_tokens // len(reading)), max(left))
        counts = [min(new, rest) for rest in left]
        tokens = self._to_device([s.tokens[s.num_read : s.num_read + new] for s in reading])
        begins = self._to_device([[sequence.num_read] for sequence in reading])
        positions = begins + torch.arange(new, device=self.target.device)
        # Padding is written behind a prompt, where nobody looks before it is written anew.
        slots = positions.clamp(max=self._cache.width - 1)
        num_seen = self._num_seen(max(s.num_read for s in reading) + new)
        self._cache.aim(slots, num_seen, first)
        mask = (torch.arange(num_seen, device=self.target.device) <= positions[..., None])[:, None]
        safe = positions.clamp(max=self.target.spec.max_positions - 1)
        output = self.target.forward(tokens, safe, mask, self._cache, self._hidden_depths)
        ready: list[int] = []
        for row, (sequence, count) in enumerate(zip(reading, counts, strict=True)):
            sequence.num_read += count
            self._keep_hidden(sequence, output, row, slice(0, count))
            if sequence.num_read == len(sequence.tokens):
                ready.append(row)
        self.stats.num_prompt_tokens += sum(counts)
        if ready:
            last = torch.stack([output.last[row, counts[row] - 1] for row in ready])
            self._begin([reading[row] for row in ready], self.target.logits(last))
            self._settle(begun={reading[row].number for row in ready})

    def _begin(self, sequences: list[EngineSequence], logits: Float[Tensor, "rows vocab"]) -> None:
        trees = [root_alone(self._to_device([[s.tokens[-1]]])[0]) for s in sequences]
        results = self._accept(sequences, trees, logits[:, None], [len(s.tokens) - 1 for s in sequences])
        for row, (sequence, result) in enumerate(zip(sequences, results, strict=True)):
            self._emit(sequence, result, None, logits[row : row + 1])
            self.stats.num_tokens += 1

    # --- One cycle ---

    def _cycle(self) -> None:
        """Propose, verify, accept and commit for the running sequences whose turn it is.

        Waits for the device once where acceptance is by choice (see `decoding.accept`), drafting apart.
        """
        rows, stats = self._next_group(), self.stats
        running = self._running[rows.start : rows.stop]
        began = time.perf_counter()
        with stats.timed("propose") as propose:
            trees = self._propose(running, rows)
        with stats.timed("verify") as verify:
            output = self._verify(running, trees, rows.start)
            logits = self.target.logits(output.last)
            stats.num_passes += 1
        with stats.timed("accept"):
            begins = [sequence.length for sequence in running]
            results = self._accept(running, trees, logits, begins)
        with stats.timed("commit"):
            self._commit(running, trees, results, rows.start, begins, output)
            for row, (sequence, tree, result) in enumerate(zip(running, trees, results, strict=True)):
                self._emit(sequence, result, tree, logits[row])
        if self.target.device.type == "cpu":  # elsewhere nobody has waited for the pass
            most = max(tree.num_nodes for tree in trees)
            rest = time.perf_counter() - began - propose.seconds - verify.seconds
            for drafting in self.drafting.values():
                drafting.planner.record_pass(len(running), most, verify.seconds)
                drafting.planner.record_rest(len(running), rest)
        with stats.timed("propose"):
            self._ask([row for row in rows if self._running[row].ending.finish_reason is None], len(rows))

    def _next_group(self) -> range:
        """Rows whose turn it is: all of them, or the first half and the second in turn."""
        count = len(self._running)
        if self.config.num_groups == 1 or count == 1:
            return range(count)
        half = (count + 1) // 2
        self._is_second = not self._is_second
        return range(half, count) if self._is_second else range(half)

    def _ask(self, rows: list[int], num_rows: int) -> None:
        """Let drafts begin that are not under way: those who draft elsewhere need not wait for the next pass."""
        for drafting in self.drafting.values():
            drafting.ask(self._running, [row for row in rows if self._running[row].drafting is drafting], num_rows)

    def _propose(self, running: list[EngineSequence], rows: range) -> list[TokenTree]:
        """A tree for every sequence in some rows, of its root alone where nothing was drafted."""
        self._ask(list(rows), len(rows))
        found: dict[int, TokenTree] = {}
        for drafting in self.drafting.values():
            found |= drafting.collect(self._running, [r for r in rows if self._running[r].drafting is drafting])
        roots = self._to_device([[sequence.tokens[-1]] for sequence in running])
        return [found.get(row) or root_alone(root) for row, root in zip(rows, roots, strict=True)]

    def _verify(self, running: list[EngineSequence], trees: list[TokenTree], first_row: int) -> TargetOutput:
        """One pass over all trees, those with fewer nodes padded; a row's nodes go behind its committed slots.

        slots of row 0   a  b  c  d | root x  y  .          its nodes see a to d, and their ancestors
        slots of row 1   e  f | root z  w  v  .  .          padding sees itself, and nobody sees it
        """
        stack = stack_trees(trees)
        most = stack.num_nodes
        lengths = self._to_device([[sequence.length] for sequence in running])
        slots = lengths + torch.arange(most, device=self.target.device)
        num_seen = self._num_seen(max(sequence.length for sequence in running) + most)
        self._cache.aim(slots, num_seen, first_row)
        columns = torch.arange(num_seen, device=self.target.device)
        if most == 1:
            mask = (columns <= lengths)[:, None, None]
        else:
            committed = (columns < lengths)[:, None].repeat(1, most, 1)
            mask = committed.scatter_(2, slots[:, None].expand(-1, most, -1), stack.ancestors)[:, None]
        return self.target.forward(stack.tokens, lengths + stack.depths, mask, self._cache, self._hidden_depths)

    def _accept(
        self,
        sequences: list[EngineSequence],
        trees: list[TokenTree],
        logits: Float[Tensor, "rows nodes vocab"],
        begins: list[int],
    ) -> list[Accepted]:
        """Walk down each tree along what its request makes of the target's logits."""
        adjusted = [row for row, sequence in enumerate(sequences) if sequence.adjustment.is_needed]
        if adjusted:
            logits = logits.float().clone()
            for row in adjusted:
                nodes = trees[row].num_nodes
                logits[row, :nodes] = sequences[row].adjustment.apply(logits[row, :nodes], trees[row])
        return accept_rows(trees, logits, [sequence.sampler for sequence in sequences], begins)

    def _commit(
        self,
        running: list[EngineSequence],
        trees: list[TokenTree],
        results: list[Accepted],
        first_row: int,
        begins: list[int],
        output: TargetOutput,
    ) -> None:
        """Move accepted paths to where they belong, and keep the hidden states that a drafter reads."""
        moved = [row for row, result in enumerate(results) if result.path and result.path[-1] != len(result.path)]
        if moved:
            most = 1 + max(len(results[row].path) for row in moved)
            # Behind a path, slots keep what they hold: nobody looks there before it is written anew.
            nodes = [[0, *results[row].path] for row in moved]
            nodes = [path + list(range(len(path), most)) for path in nodes]
            host = [[first_row + row, begins[row], *path] for row, path in zip(moved, nodes, strict=True)]
            row, begin, node = torch.tensor(host, device=self.target.device).split([1, 1, most], dim=1)
            self._cache.move(row[:, 0], begin + node, begin + torch.arange(most, device=self.target.device))
        for row, (sequence, tree, result) in enumerate(zip(running, trees, results, strict=True)):
            if self._hidden_depths:
                path = torch.tensor([0, *result.path], device=self.target.device)
                self._keep_hidden(sequence, output, row, path)
            if tree.num_nodes > 1:
                sequence.num_kept = tree.num_kept(len(result.path))

    def _keep_hidden(
        self, sequence: EngineSequence, output: TargetOutput, row: int, index: slice | Int[Tensor, " some"]
    ) -> None:
        if sequence.drafting is not None:
            for depth in sequence.drafting.observed.hidden_depths:
                sequence.hidden.setdefault(depth, []).append(output.hidden[depth][row, index])

    def _emit(
        self, sequence: EngineSequence, result: Accepted, tree: TokenTree | None, logits: Float[Tensor, "nodes vocab"]
    ) -> None:
        """Add what was accepted to the answer."""
        emitted = sequence.ending.cut([*result.tokens, result.next_token])
        sequence.tokens += emitted
        sequence.adjustment.emit(emitted)
        rejected: list[int] = []
        if tree is not None:
            num_accepted, num_drafted = len(result.path), tree.num_nodes - 1
            self.stats.record(num_drafted, min(num_accepted, len(emitted)), len(emitted))
            if num_drafted and sequence.drafting is not None:
                sequence.drafting.planner.record(tree.num_levels, num_accepted)
                kept = set(result.path)
                rejected = [t for node, t in enumerate(tree.tokens.tolist()) if node and node not in kept]
        logprobs = None
        if sequence.request.logprobs is not None:
            logprobs = _logprobs(logits[[0, *result.path][: len(emitted)]], emitted, sequence.request.logprobs)
        self._updates.append(
            Update(
                sequence.number,
                emitted,
                min(len(result.tokens), len(emitted)),
                rejected,
                sequence.ending.finish_reason,
                logprobs,
            )
        )

    def _num_seen(self, most: int) -> int:
        return min(-(-most // _SEEN_GRAIN) * _SEEN_GRAIN, self._cache.width)

    def _to_device(self, rows: Sequence[Sequence[int]]) -> Int[Tensor, "rows most"]:
        most = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (most - len(row))] for row in rows], device=self.target.device)


def _placed(sequences: list[EngineSequence], first: int, rows: dict[int, int]) -> list[EngineSequence]:
    """Sequences in an order that leaves as many as possible in the rows that they have."""
    places = range(first, first + len(sequences))
    placed: dict[int, EngineSequence] = {rows[s.number]: s for s in sequences if rows[s.number] in places}
    others = iter([s for s in sequences if rows[s.number] not in places])
    return [placed[place] if place in placed else next(others) for place in places]


def _logprobs(logits: Float[Tensor, "tokens vocab"], tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    log_probs = logits.float().log_softmax(dim=-1)
    own = log_probs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not num_top:
        return [TokenLogprobs(value, []) for value in own]
    values, ids = log_probs.topk(min(num_top, log_probs.shape[1]), dim=-1)
    rows = zip(own, ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprobs(value, list(zip(i, v, strict=True))) for value, i, v in rows]
