"""The drafter's side: drafting states of many sequences, of any number of targets.

Every request says how many tokens of the sequence it assumes to be known. If that is not so (this process is new, or
the sequence was idle for too long), the reply is a miss: nothing is guessed. While no request waits, the host can draft
ahead below its last reply (see `remote.ahead`).
"""

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moray.decoding.remote.ahead import Ahead, Drawn, Session, VerifiedUpdate, can_run_ahead
from moray.decoding.remote.messages import DraftedTree, DraftReply, DraftRequest, Entry, check_request, described
from moray.decoding.sampling.batched_select import picks_of
from moray.decoding.sampling.sampler import Sampler
from moray.decoding.synthetic import NO_COST, SyntheticCost
from moray.drafters.base import Drafter
from moray.trees.shapes import ChainShape, GrowableShape
from moray.trees.tree import TokenTree

_MAX_GONE = 10_000
Change = Literal["opened", "closed", "expired"]


@dataclass
class HostStats:
    """Counts and times of a host so far."""

    num_requests: int = 0
    num_drafts: int = 0
    num_misses: int = 0
    num_expired: int = 0
    seconds: float = 0.0
    """Spent answering requests."""
    ahead_seconds: float = 0.0
    """Spent drafting ahead while no request waited."""
    batch_sizes: Counter[int] = field(default_factory=Counter)
    """How many requests asked for each number of drafts."""
    ahead: Counter[str] = field(default_factory=Counter)
    """State of drafting ahead when a chain was requested: "right", "wrong" or "unfinished"."""


class _HostedJob(NamedTuple):
    """A draft that an entry requests."""

    session: Session
    root: int
    shape: GrowableShape
    drawn: Drawn
    guessed: tuple[int, ...] | None
    """Root and chain, if they were drafted ahead."""
    wants_scores: bool


class DraftHost:
    """Answers the requests of any number of targets, one after the other."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        max_model_len: int,
        max_expanded: int,
        idle_seconds: float = 60.0,
        *,
        run_ahead: bool = False,
        cost: SyntheticCost = NO_COST,
    ) -> None:
        """
        Args:
            drafters: by the names that requests use.
            max_model_len: maximum number of tokens of a sequence.
            max_expanded: maximum number of nodes expanded in a tree, including those expanded ahead.
            idle_seconds: a session that was not used for this long is dropped.
            run_ahead: draft ahead below chains that were sent, as far as `max_expanded` allows; the caller must call
                `go_on`.
            cost: synthetic cost of a draft, if any.
        """
        self.stats = HostStats()
        self._drafters = drafters
        self._sizes = max_model_len, max_expanded
        self._idle_seconds = idle_seconds
        self._cost = cost
        self._runs_ahead = run_ahead
        self._aheads: deque[Ahead] = deque()
        self._sessions: dict[str, Session] = {}
        self._free: dict[str, list[object]] = {name: [] for name in drafters}
        self._swept = time.monotonic()
        self._lock = threading.Lock()
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Recently closed sessions."""
        self._changes: deque[tuple[str, Change]] = deque()
        """In order; added from any thread, carried out by the one that holds the lock."""

    @property
    def num_sessions(self) -> int:
        """Sequences that have a drafting state."""
        return len(self._sessions)

    @torch.inference_mode()
    def handle(self, request: DraftRequest, tensors: Mapping[str, Tensor]) -> DraftReply:
        """Take in the verified tokens of a request and make the drafts that it asks for.

        Raises:
            DataError: the request cannot be answered (see `check_request`); nothing of it is applied.
            ConfigError: it asks for a tree that its drafter cannot draft.
        """
        check_request(request, tensors, self._drafters, *self._sizes)
        with self._locked():
            begin = time.perf_counter()
            for session in request.closed:
                self._close(session)
            self._sweep()
            trees: list[DraftedTree] = []
            jobs: dict[int, _HostedJob] = {}
            at = 0
            for index, entry in enumerate(request.entries):
                end = at + len(entry.tokens)
                session = self._find(entry)
                if session is not None:
                    job = self._job_of(session, entry, request)
                    if job is not None:
                        jobs[index] = job
                    memory = {name: rows[None, at:end] for name, rows in tensors.items()}
                    self._tell(session, entry, memory, is_late=job is not None and job.guessed is not None)
                trees.append(DraftedTree(session=entry.session, known=session.known if session else 0))
                at = end
            for index, fields in self._drafts(jobs).items():
                trees[index] = trees[index].model_copy(update=fields)
            seconds = time.perf_counter() - begin
            self._count(trees, seconds)
            return DraftReply(number=request.number, trees=tuple(trees), seconds=seconds)

    @torch.inference_mode()
    def go_on(self) -> bool:
        """Draft one level ahead, for use while no request waits; return whether there is more to do."""
        with self._locked():
            if not self._aheads:
                return False
            begin = time.perf_counter()
            try:
                if self._aheads[0].grow():
                    return True
            except Exception:
                for session in self._aheads.popleft().sessions:  # their states are unknown: start them again
                    self._close(session.name)
                raise
            finally:
                self.stats.ahead_seconds += time.perf_counter() - begin
            self._aheads.popleft()
            return bool(self._aheads)

    def open(self, session: str) -> None:
        """A sequence may start here, even if it was closed before. `open`, `close` and `expire` never wait."""
        self._change(session, "opened")

    def close(self, session: str) -> None:
        """Drop a sequence for good: a request for it that is still under way does not start it again."""
        self._change(session, "closed")

    def expire(self, session: str) -> None:
        """Drop a sequence for good that is no longer used."""
        self._change(session, "expired")

    def seconds_unused(self, session: str) -> float:
        """Seconds since a draft of the sequence was requested; infinite if it is unknown."""
        known = self._sessions.get(session)
        return math.inf if known is None else time.monotonic() - known.used

    def _change(self, session: str, change: Change) -> None:
        self._changes.append((session, change))
        self._make_changes()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._make_changes_now()
                yield
        finally:
            self._make_changes()

    def _make_changes(self) -> None:
        """Carry out changes, unless a draft is under way: its thread does so afterwards."""
        while self._changes and self._lock.acquire(blocking=False):
            try:
                self._make_changes_now()
            finally:
                self._lock.release()

    def _make_changes_now(self) -> None:
        while self._changes:
            session, change = self._changes.popleft()
            if change == "opened":
                self._gone.pop(session, None)
                continue
            self.stats.num_expired += change == "expired" and session in self._sessions
            self._close(session)
            self._gone[session] = None
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)

    def _close(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            session.ahead = None
            self._free[session.drafter].append(session.state)

    def _find(self, entry: Entry) -> Session | None:
        """The session of an entry; None for a miss."""
        drafter = self._drafters[entry.drafter]
        session = self._sessions.get(entry.session)
        if entry.known == 0 and entry.session not in self._gone:
            session = self._begin(entry.session, entry.drafter, drafter)
        if session is None or session.known != entry.known or session.drafter != entry.drafter:
            self.stats.num_misses += 1
            return None
        session.used = time.monotonic()
        return session

    def _job_of(self, session: Session, entry: Entry, request: DraftRequest) -> _HostedJob | None:
        """The draft that an entry requests, if any, with what was drafted ahead for it."""
        if entry.root is None:
            return None
        shape, drawn = (
            request.shapes[entry.shape],
            (request.params[entry.params], entry.sequence, entry.num_target_layers),
        )
        guessed = None
        if isinstance(shape, ChainShape) and session.ahead is not None:
            guess = session.guess
            if guess is not None and guess.is_right(entry.tokens, entry.root, drawn):
                guessed = guess.chain[: shape.depth + 1]
            self.stats.ahead["unfinished" if guess is None else "wrong" if guessed is None else "right"] += 1
        return _HostedJob(session, entry.root, shape, drawn, guessed, entry.wants_scores)

    def _tell(self, session: Session, entry: Entry, memory: dict[str, Tensor], *, is_late: bool) -> None:
        """Let a session take in the verified tokens of an entry."""
        session.guess = session.ahead = None
        drafter = self._drafters[session.drafter]
        device = drafter.head.weight.device
        session.take_in_late(drafter)
        if entry.tokens:
            known = {name: rows.to(device) for name, rows in memory.items()}
            update = VerifiedUpdate(torch.tensor(entry.tokens, device=device), known, entry.num_kept)
            session.learn(drafter, update, is_late=is_late)

    def _drafts(self, jobs: Mapping[int, _HostedJob]) -> dict[int, dict[str, Any]]:
        """Make the requested drafts, as fields of `DraftedTree`."""
        found: dict[int, dict[str, Any]] = {}
        groups: dict[tuple[str, GrowableShape, int | None], list[int]] = {}
        for index, job in jobs.items():
            if job.guessed is not None:
                found[index] = {"tokens": job.guessed, "max_depth": len(job.guessed) - 1, "is_chain": True}
            else:
                groups.setdefault((job.session.drafter, job.shape, job.drawn[2]), []).append(index)
        for (name, shape, num_target_layers), indices in groups.items():
            trees = self._draft(self._drafters[name], shape, num_target_layers, [jobs[index] for index in indices])
            found |= {
                index: described(tree, with_scores=jobs[index].wants_scores)
                for index, tree in zip(indices, trees, strict=True)
            }
        if self._runs_ahead:
            self._plan_ahead([(job, found[index]["tokens"]) for index, job in jobs.items()])
        return found

    def _draft(
        self, drafter: Drafter, shape: GrowableShape, num_target_layers: int | None, jobs: list[_HostedJob]
    ) -> list[TokenTree]:
        device, size = drafter.head.weight.device, drafter.spec.vocab_size
        samplers = [Sampler(params, size, device, sequence) for params, sequence, _ in (job.drawn for job in jobs)]
        roots = torch.tensor([job.root for job in jobs], device=device)
        picks = picks_of(samplers, [job.session.known for job in jobs], shape, are_certain=True)
        for job in jobs:
            job.session.num_expanded = shape.num_expanded
            if num_target_layers is not None:
                drafter.set_num_target_layers(job.session.state, num_target_layers)
        with self._cost.spent(len(jobs)):
            return drafter.propose_many([job.session.state for job in jobs], roots, shape, picks)

    def _plan_ahead(self, answered: list[tuple[_HostedJob, tuple[int, ...]]]) -> None:
        """Plan to draft ahead below the chains among these replies; chains of one length go together.

        Drops obsolete plans here: while requests never cease, `go_on` gets no turn to do so.
        """
        self._aheads = deque(ahead for ahead in self._aheads if ahead.sessions)
        groups: dict[tuple[str, int, int, bool], list[tuple[_HostedJob, tuple[int, ...]]]] = {}
        for job, tokens in answered:
            is_guessed, depth = job.guessed is not None, job.shape.depth
            if isinstance(job.shape, ChainShape) and (is_guessed or len(tokens) == depth + 1):
                key = job.session.drafter, len(tokens), depth, is_guessed
                groups.setdefault(key, []).append((job, tokens))
        for (name, num_nodes, depth, _), group in groups.items():
            drafter = self._drafters[name]
            if can_run_ahead(drafter, num_nodes, depth, self._sizes[1]):
                sessions, drawn = [job.session for job, _ in group], [job.drawn for job, _ in group]
                self._aheads.append(Ahead(drafter, sessions, [tokens for _, tokens in group], drawn, depth))

    def _begin(self, name: str, drafter_name: str, drafter: Drafter) -> Session:
        self._close(name)
        free = self._free[drafter_name]
        state = free.pop() if free else drafter.new_state(*self._sizes)
        drafter.reset(state)
        self._sessions[name] = Session(name, drafter_name, state, time.monotonic())
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
