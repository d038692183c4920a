"""Drafts from other processes: the engine's draft source in front of a pool of drafters.

A sequence stays with one drafter process as long as that process lives. This side keeps everything that it has sent for
a sequence (2 KiB per token for Llama-3-8B's MoA), so that another process can take over at any time. A sequence whose
draft has not arrived yet is not requested again, so requests do not pile up.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.decoding.engine.draft_source import Ask, DraftSource
from moray.decoding.params import SamplingParams
from moray.decoding.remote.channel import Channel, Endpoint, SocketChannel
from moray.decoding.remote.drafter_pool import CircuitBreaker, DrafterPool
from moray.decoding.remote.messages import DraftReply, DraftRequest, Entry, last_rows, pack, restored, unpack_reply
from moray.decoding.remote.remote_stats import RemoteStats
from moray.drafters.base import Drafter, Memory
from moray.errors import DataError, UnreachableError
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

_LOGGER = logging.getLogger(__name__)

_STALL_SECONDS = 5.0
"""A drafter process that has not answered for this long is given up."""
_MAX_TOLD_BYTES = 8 << 20
"""Maximum bytes of memory in one request; its first sequence may exceed it, and other sequences wait for the next
request."""


@dataclass
class _SessionLog:
    """What the drafter process of one sequence was sent, and what it still has to be sent."""

    session: str
    tokens: list[int] = field(default_factory=list)
    memory: dict[str, list[Tensor]] = field(default_factory=dict)
    num_sent: int = 0
    """Tokens that were sent to its drafter process."""
    num_kept: int = 0
    """`num_kept` of the first `extend` call whose tokens have not been sent yet."""
    place: Endpoint | None = None
    request: int | None = None
    """Number of the unanswered request for its draft."""

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of memory that were not sent to its drafter process."""
        count = len(self.tokens) - self.num_sent
        return sum(count * rows[0][0].numel() * rows[0].element_size() for rows in self.memory.values())


@dataclass
class _PendingRequest:
    """An unanswered request."""

    owed: dict[str, Ask]
    """By session."""
    since: float


@dataclass
class _Connection:
    """The channel to one drafter process, and its unanswered requests."""

    channel: Channel
    debts: dict[int, _PendingRequest] = field(default_factory=dict)
    """By the request's number, in the order in which they are answered."""


class RemoteDrafts(DraftSource):
    """A drafter whose `observe` runs here, with the target, and whose `propose` runs in other processes."""

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        places: DrafterPool,
        *,
        timeout: float = 0.1,
        max_debts: int = 2,
        connect: Callable[[Endpoint], Channel] = SocketChannel,
    ) -> None:
        """
        Args:
            drafter: observes the target; its copies in other processes draft.
            name: the drafter's name in those processes.
            places: assigns drafter processes to sequences.
            timeout: seconds that a cycle waits for drafts; later ones are not used.
            max_debts: requests that one drafter process may leave unanswered: one for each micro-batch of the engine,
                and as many for sequences that have just started.
            connect: opens a channel.
        """
        self.stats = RemoteStats()
        self._drafter, self._name = drafter, name
        self._places, self._timeout, self._connect = places, timeout, connect
        self._max_debts = max_debts
        self._told: dict[int, _SessionLog] = {}
        self._lines: dict[Endpoint, _Connection] = {}
        self._closed: dict[Endpoint, list[str]] = {}
        self._shunned = CircuitBreaker()
        self._device = drafter.head.weight.device
        self._num_requests = 0
        self._ready: dict[int, TokenTree] = {}
        """Drafts that have arrived and were not collected yet."""

    @property
    def observed(self) -> TapNeeds:
        return self._drafter.observed

    @property
    def max_depth(self) -> int | None:
        return self._drafter.max_depth

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return self._drafter.layer_counts

    @property
    def is_remote(self) -> bool:
        return True

    def observe(self, taps: Taps) -> Memory:
        return self._drafter.observe(taps)

    def open(self, number: int) -> None:
        if number not in self._told:
            self._told[number] = _SessionLog(uuid.uuid4().hex)
            self._places.open(self._told[number].session)

    def num_known(self, number: int) -> int:
        return len(self._told[number].tokens) if number in self._told else 0

    def can_draft(self, number: int) -> bool:
        told = self._told.get(number)
        if told is None:
            return False
        if told.place is None:
            told.place, told.num_sent = self._find(told.session), 0
        line = self._look(told.place)  # takes in replies, which free the line
        is_free = line is None or len(line.debts) < self._max_debts
        return told.place is not None and told.request is None and is_free

    def extend(self, number: int, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int) -> None:
        told = self._told[number]
        if told.num_sent == len(told.tokens):
            told.num_kept = num_kept
        told.tokens += tokens.tolist()
        for name, rows in memory.items():
            told.memory.setdefault(name, []).append(rows[0].cpu())

    def ask(self, asks: Sequence[Ask]) -> None:
        by_place: dict[Endpoint, list[Ask]] = {}
        for ask in asks:
            self._ready.pop(ask.number, None)  # a late one has another root
            place = self._told[ask.number].place
            if place is not None:
                by_place.setdefault(place, []).append(ask)
        for place, group in by_place.items():
            self._send(place, group)

    def is_under_way(self, number: int) -> bool:
        told = self._told.get(number)
        if told is not None and told.request is not None:
            self._look(told.place)
        return told is not None and told.request is not None

    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        begin, drafted = time.monotonic(), self.stats.drafting_seconds
        waiting = [told for told in (self._told.get(number) for number in numbers) if told is not None]
        for place in dict.fromkeys(told.place for told in waiting if told.place is not None):
            while any(told.place == place and told.request is not None for told in waiting):
                line = self._lines.get(place)
                left = begin + self._timeout - time.monotonic()
                if line is None or not self._receive(place, line, max(0.0, left)):
                    break
        waited = time.monotonic() - begin
        self.stats.waiting_seconds += waited
        self.stats.channel_seconds += max(0.0, waited - (self.stats.drafting_seconds - drafted))
        self.stats.num_late += sum(told.request is not None for told in waiting)
        return {number: self._ready.pop(number) for number in numbers if number in self._ready}

    def close(self, number: int) -> None:
        told = self._told.pop(number, None)
        self._ready.pop(number, None)
        if told is not None:
            self._places.close(told.session)
            if told.place is not None:
                self._closed.setdefault(told.place, []).append(told.session)

    def _find(self, session: str) -> Endpoint | None:
        """The drafter process of a session; None if it failed recently, so that the pool looks for another."""
        place = self._places.find(session)
        if place is None or place not in self._shunned:
            return place
        self._places.lose(session)
        return None

    def _send(self, place: Endpoint, asks: list[Ask]) -> None:
        """Send one request for the sequences of one drafter process."""
        shapes: dict[GrowableShape, int] = {}
        params: dict[SamplingParams, int] = {}
        entries: list[Entry] = []
        tensors: dict[str, list[Tensor]] = {}
        num_bytes = 0
        for ask in asks:
            told = self._told[ask.number]
            num_bytes += told.num_unsent_bytes
            if entries and num_bytes > _MAX_TOLD_BYTES:
                break
            for name, rows in told.memory.items():
                tensors.setdefault(name, []).append(last_rows(rows, len(told.tokens) - told.num_sent))
            entries.append(
                Entry(
                    session=told.session,
                    drafter=self._name,
                    known=told.num_sent,
                    tokens=tuple(told.tokens[told.num_sent :]),
                    num_kept=told.num_kept,
                    root=ask.root,
                    shape=shapes.setdefault(ask.shape, len(shapes)),
                    params=params.setdefault(ask.sampler.params, len(params)),
                    sequence=ask.sampler.sequence,
                    num_target_layers=ask.num_target_layers,
                    wants_scores=ask.wants_scores,
                )
            )
            told.num_sent, told.num_kept = len(told.tokens), 0
        asks = asks[: len(entries)]
        self._num_requests += 1
        request = DraftRequest(
            number=self._num_requests,
            entries=tuple(entries),
            shapes=tuple(shapes),
            params=tuple(params),
            closed=tuple(self._closed.pop(place, ())),
        )
        frame = pack(request, tensors)
        try:
            if place not in self._lines:
                self._drop_dead_lines()
                self._lines[place] = _Connection(self._connect(place))
            line = self._lines[place]
            line.channel.send(frame)
        except UnreachableError:
            self._give_up(place)
            return
        owed = {self._told[ask.number].session: ask for ask in asks}
        line.debts[request.number] = _PendingRequest(owed, time.monotonic())
        for ask in asks:
            self._told[ask.number].request = request.number
        self.stats.num_cycles += 1
        self.stats.num_bytes_sent += len(frame)

    def _receive(self, place: Endpoint, line: _Connection, seconds: float) -> bool:
        """Take in the next reply; False if none arrives in time or the process is given up."""
        try:
            frame = line.channel.receive(seconds)
            if frame is None:
                if any(time.monotonic() - debt.since > _STALL_SECONDS for debt in line.debts.values()):
                    raise UnreachableError("the drafter does not answer")
                return False
            reply = unpack_reply(frame)
            self._shunned.forgive(place)
            self.stats.num_bytes_received += len(frame)
            self.stats.drafting_seconds += reply.seconds
            self._take_in(line, reply)
        except UnreachableError:
            self._give_up(place)
            return False
        except DataError as error:
            _LOGGER.warning("a drafter is given up: %s", error)
            self._give_up(place)
            return False
        return True

    def _look(self, place: Endpoint | None) -> _Connection | None:
        """Take in the replies that have arrived, without waiting; return the connection if it is still open."""
        line = None if place is None else self._lines.get(place)
        while place is not None and line is not None and line.debts and self._receive(place, line, 0.0):
            pass
        return None if place is None else self._lines.get(place)

    def _take_in(self, line: _Connection, reply: DraftReply) -> None:
        """
        Raises:
            DataError: the reply is not what was requested.
        """
        debt = line.debts.pop(reply.number, None)
        if debt is None:
            raise DataError(f"request {reply.number} was answered, which is not open")
        for drafted in reply.trees:
            ask = debt.owed.pop(drafted.session, None)
            if ask is None:
                raise DataError(f"a draft for session '{drafted.session[:40]}' came, for which none was asked")
            told = self._told.get(ask.number)
            if told is None or told.session != drafted.session or told.request != reply.number:
                continue
            told.request = None
            if drafted.known != told.num_sent:
                self.stats.num_misses += 1
                told.place, told.num_sent = None, 0  # the next request sends everything, to any process
            elif drafted.tokens:
                size = self._drafter.spec.vocab_size
                self._ready[ask.number] = restored(drafted, self._device, ask.root, ask.shape, size)
        if debt.owed:
            raise DataError(f"request {reply.number} was answered without {len(debt.owed)} of its drafts")

    def _drop_dead_lines(self) -> None:
        """Close connections to processes that ended while they had no sequences."""
        for place, line in [*self._lines.items()]:
            if not line.debts and all(told.place != place for told in self._told.values()):
                self._receive(place, line, 0.0)

    def _give_up(self, place: Endpoint) -> None:
        """Close the connection to a process; its sequences look for another one."""
        line = self._lines.pop(place, None)
        if line is not None:
            line.channel.close()
        self._closed.pop(place, None)
        self.stats.num_lost += 1
        self._shunned.add(place)
        for told in self._told.values():
            if told.place == place:
                told.place, told.num_sent, told.request = None, 0, None
                self._places.lose(told.session)
