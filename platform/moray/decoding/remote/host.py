"""A drafter's side: drafting states of many sequences, whoever their target is.

Every message says how far the sequence was known before it. Where that is not so (this process is new, or the
sequence was idle for too long) the answer is a miss: nothing is guessed.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moray.decoding.params import SamplingParams
from moray.decoding.picking import picks_of
from moray.decoding.remote.messages import DraftedTree, DraftReply, DraftRequest, Entry, described
from moray.decoding.sampling import Sampler
from moray.decoding.synthetic import NO_COST, SyntheticCost
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

_MOST_GONE = 10_000


@dataclass
class HostStats:
    """What a host has done so far."""

    num_requests: int = 0
    num_drafts: int = 0
    num_misses: int = 0
    num_expired: int = 0
    seconds: float = 0.0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    """How many messages asked for so many drafts."""


@dataclass
class _Session:
    drafter: str
    state: object
    known: int
    used: float


class _Wish(NamedTuple):
    """A draft that an entry asks for."""

    entry: Entry
    root: int
    session: _Session


class DraftHost:
    """Answers messages of any number of targets, one after the other."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        capacity: int,
        max_expanded: int,
        idle_seconds: float = 60.0,
        cost: SyntheticCost = NO_COST,
    ) -> None:
        """
        Args:
            drafters: by the names that messages use.
            capacity: most tokens of a sequence.
            max_expanded: most nodes of a tree that are expanded.
            idle_seconds: a session that nobody has asked for so long is forgotten.
            cost: of a draft, if it is made up.
        """
        self.stats = HostStats()
        self._drafters = drafters
        self._sizes = capacity, max_expanded
        self._idle_seconds = idle_seconds
        self._cost = cost
        self._sessions: dict[str, _Session] = {}
        self._free: dict[str, list[object]] = {name: [] for name in drafters}
        self._swept = time.monotonic()
        self._lock = threading.Lock()
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Sessions closed last."""

    @property
    def num_sessions(self) -> int:
        """Sequences that hold a drafting state."""
        return len(self._sessions)

    @torch.inference_mode()
    def handle(self, request: DraftRequest, tensors: Mapping[str, Tensor]) -> DraftReply:
        """Take in what is told, and draft what is asked for."""
        with self._lock:
            begin = time.perf_counter()
            for session in request.closed:
                self._close(session)
            self._sweep()
            trees: list[DraftedTree] = []
            wishes: dict[tuple[str, int], dict[int, _Wish]] = {}
            asked: set[str] = set()
            at = 0
            for place, entry in enumerate(request.entries):
                if entry.session in asked:
                    raise DataError("a message goes on with a sequence after asking for a draft of it")
                end = at + len(entry.tokens)
                session = self._take_in(entry, {name: rows[None, at:end] for name, rows in tensors.items()})
                trees.append(DraftedTree(session=entry.session, known=session.known if session else 0))
                if session is not None and entry.root is not None:
                    wishes.setdefault((entry.drafter, entry.shape), {})[place] = _Wish(entry, entry.root, session)
                    asked.add(entry.session)
                at = end
            for (drafter, shape), together in wishes.items():
                drafted = self._draft(drafter, request.shapes[shape], request.params, list(together.values()))
                for place, tree in zip(together, drafted, strict=True):
                    trees[place] = trees[place].model_copy(update=described(tree))
            seconds = time.perf_counter() - begin
            self._count(trees, seconds)
            return DraftReply(number=request.number, trees=tuple(trees), seconds=seconds)

    def open(self, session: str) -> None:
        """A sequence may begin here, even if it has been closed before."""
        with self._lock:
            self._gone.pop(session, None)

    def close(self, session: str) -> None:
        """Forget a sequence for good: what is still under way for it begins nothing."""
        with self._lock:
            self._close(session)
            self._gone[session] = None
            while len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)

    def _close(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            self._free[session.drafter].append(session.state)

    def _take_in(self, entry: Entry, memory: dict[str, Tensor]) -> _Session | None:
        """Extend an entry's session by what it tells; None: a miss."""
        drafter = self._drafters.get(entry.drafter)
        if drafter is None:
            raise DataError(f"drafter '{entry.drafter}' is not here; there are {', '.join(self._drafters)}")
        session = self._sessions.get(entry.session)
        if entry.known == 0 and entry.session not in self._gone:
            session = self._begin(entry.session, entry.drafter, drafter)
        if session is None or session.known != entry.known or session.drafter != entry.drafter:
            self.stats.num_misses += 1
            return None
        device, session.used = drafter.head.weight.device, time.monotonic()
        if session.known + len(entry.tokens) > self._sizes[0]:
            raise DataError(f"a sequence has more than {self._sizes[0]} tokens")
        if entry.tokens:
            tokens = torch.tensor(entry.tokens, device=device)
            known = {name: rows.to(device) for name, rows in memory.items()}
            drafter.extend(session.state, tokens, known, entry.num_kept)
            session.known += len(entry.tokens)
        return session

    def _draft(
        self, name: str, shape: GrowableShape, params: Sequence[SamplingParams], wishes: list[_Wish]
    ) -> list[TokenTree]:
        drafter = self._drafters[name]
        device, size = drafter.head.weight.device, drafter.spec.vocab_size
        samplers = [Sampler(params[wish.entry.params], size, device, wish.entry.sequence) for wish in wishes]
        roots = torch.tensor([wish.root for wish in wishes], device=device)
        picks = picks_of(samplers, [wish.session.known for wish in wishes], shape, are_certain=True)
        with self._cost.spent(len(wishes)):
            return drafter.propose_many([wish.session.state for wish in wishes], roots, shape, picks)

    def _begin(self, name: str, drafter_name: str, drafter: Drafter) -> _Session:
        self._close(name)
        free = self._free[drafter_name]
        state = free.pop() if free else drafter.new_state(*self._sizes)
        drafter.reset(state)
        self._sessions[name] = _Session(drafter_name, state, 0, time.monotonic())
        return self._sessions[name]

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept < self._idle_seconds / 4:
            return
        self._swept = now
        for name in [name for name, session in self._sessions.items() if now - session.used > self._idle_seconds]:
            self._close(name)
            self.stats.num_expired += 1

    def _count(self, trees: list[DraftedTree], seconds: float) -> None:
        stats, num_drafts = self.stats, sum(bool(tree.tokens) for tree in trees)
        stats.num_requests += 1
        stats.num_drafts += num_drafts
        stats.seconds += seconds
        stats.batch_sizes[num_drafts] += 1
