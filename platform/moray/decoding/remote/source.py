"""Drafts from other processes: the engine's draft source in front of a pool of drafters.

A sequence stays with one drafter process as long as that process lives. This side keeps everything that it has sent for
a sequence (2 KiB per token for Llama-3-8B's MoA), so that another process can take over at any time. A sequence whose
draft has not arrived yet is not requested again, so requests do not pile up.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence

from jaxtyping import Int
from torch import Tensor

from moray.batch import TapNeeds, Taps
from moray.decoding.engine.draft_source import DraftJob, DraftSource
from moray.decoding.params import SamplingParams
from moray.decoding.remote.channel import Channel, Endpoint, SocketChannel
from moray.decoding.remote.connection import Connection
from moray.decoding.remote.drafter_pool import CircuitBreaker, DrafterPool
from moray.decoding.remote.messages import DraftedTree, DraftReply, DraftRequest, Entry, pack, restored
from moray.decoding.remote.remote_stats import RemoteStats
from moray.decoding.remote.session_log import SessionLog
from moray.drafters.base import Drafter, Memory
from moray.errors import DataError, UnreachableError
from moray.trees.shapes import GrowableShape
from moray.trees.tree import TokenTree

_LOGGER = logging.getLogger(__name__)

_MAX_MEMORY_BYTES = 8 << 20
"""Maximum bytes of memory in one request; its first sequence may exceed it, and other sequences wait for the next
request."""


class RemoteDrafts(DraftSource):
    """A drafter whose `observe` runs here, with the target, and whose `propose_many` runs in other processes."""

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        pool: DrafterPool,
        *,
        timeout: float = 0.1,
        max_inflight: int = 2,
        connect: Callable[[Endpoint], Channel] = SocketChannel,
    ) -> None:
        """
        Args:
            drafter: observes the target; its copies in other processes draft.
            name: the drafter's name in those processes.
            pool: assigns drafter processes to sequences.
            timeout: seconds that a cycle waits for drafts; later ones are not used.
            max_inflight: requests that one drafter process may leave unanswered: one for each micro-batch of the
                engine, and as many for sequences that have just started.
            connect: opens a channel.
        """
        self.stats = RemoteStats()
        self._drafter, self._name = drafter, name
        self._pool, self._timeout, self._connect = pool, timeout, connect
        self._max_inflight = max_inflight
        self._logs: dict[int, SessionLog] = {}
        """By number of the sequence."""
        self._connections: dict[Endpoint, Connection] = {}
        self._closed_sessions: dict[Endpoint, list[str]] = {}
        """Sessions that a process may forget; the next request tells it."""
        self._breaker = CircuitBreaker()
        self._device = drafter.head.weight.device
        self._num_requests = 0
        self._ready: dict[int, TokenTree] = {}
        """Drafts that have arrived and were not collected yet, by number of the sequence."""

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
        if number not in self._logs:
            self._logs[number] = SessionLog(uuid.uuid4().hex)
            self._pool.open(self._logs[number].session)

    def num_known(self, number: int) -> int:
        return len(self._logs[number].tokens) if number in self._logs else 0

    def can_draft(self, number: int) -> bool:
        log = self._logs.get(number)
        if log is None:
            return False
        if log.endpoint is None:
            log.move_to(self._find(log.session))
        connection = self._poll(log.endpoint)  # replies that have arrived make room for another request
        has_room = connection is None or connection.num_pending < self._max_inflight
        return log.endpoint is not None and log.request is None and has_room

    def extend(self, number: int, tokens: Int[Tensor, " new"], memory: Memory, num_kept: int) -> None:
        self._logs[number].extend(tokens.tolist(), memory, num_kept)

    def submit(self, jobs: Sequence[DraftJob]) -> None:
        by_endpoint: dict[Endpoint, list[DraftJob]] = {}
        for job in jobs:
            self._ready.pop(job.number, None)  # a late draft has another root
            endpoint = self._logs[job.number].endpoint
            if endpoint is not None:
                by_endpoint.setdefault(endpoint, []).append(job)
        for endpoint, group in by_endpoint.items():
            self._request(endpoint, self._that_fit(group))

    def is_under_way(self, number: int) -> bool:
        log = self._logs.get(number)
        if log is not None and log.request is not None:
            self._poll(log.endpoint)
        return log is not None and log.request is not None

    def collect(self, numbers: Sequence[int]) -> dict[int, TokenTree]:
        begin, drafting_before = time.monotonic(), self.stats.drafting_seconds
        logs = [self._logs[number] for number in numbers if number in self._logs]
        for endpoint in dict.fromkeys(log.endpoint for log in logs if log.endpoint is not None):
            self._wait_for(endpoint, logs, begin + self._timeout)
        waited = time.monotonic() - begin
        self.stats.waiting_seconds += waited
        self.stats.channel_seconds += max(0.0, waited - (self.stats.drafting_seconds - drafting_before))
        self.stats.num_late += sum(log.request is not None for log in logs)
        return {number: self._ready.pop(number) for number in numbers if number in self._ready}

    def close(self, number: int) -> None:
        log = self._logs.pop(number, None)
        self._ready.pop(number, None)
        if log is not None:
            self._pool.close(log.session)
            if log.endpoint is not None:
                self._closed_sessions.setdefault(log.endpoint, []).append(log.session)

    # --- Requests ---

    def _find(self, session: str) -> Endpoint | None:
        """The drafter process of a session; None if it failed recently, so that the pool looks for another."""
        endpoint = self._pool.find(session)
        if endpoint is None or endpoint not in self._breaker:
            return endpoint
        self._pool.lose(session)
        return None

    def _that_fit(self, jobs: list[DraftJob]) -> list[DraftJob]:
        """The first of these requests whose memory fits into one message; the others are made in the next cycle."""
        num_bytes = 0
        for count, job in enumerate(jobs):
            num_bytes += self._logs[job.number].num_unsent_bytes
            if count and num_bytes > _MAX_MEMORY_BYTES:
                return jobs[:count]
        return jobs

    def _request(self, endpoint: Endpoint, jobs: list[DraftJob]) -> None:
        """Send one request to one drafter process."""
        self._num_requests += 1
        frame = self._pack(endpoint, jobs)
        logs = {job.number: self._logs[job.number] for job in jobs}
        for log in logs.values():
            log.mark_sent(self._num_requests)
        try:
            self._connected(endpoint).send(frame, self._num_requests, {logs[job.number].session: job for job in jobs})
        except UnreachableError:
            self._give_up(endpoint)
            return
        self.stats.num_cycles += 1
        self.stats.num_bytes_sent += len(frame)

    def _pack(self, endpoint: Endpoint, jobs: list[DraftJob]) -> bytes:
        """The message that asks for these drafts. Shapes and sampling parameters that are alike are sent once."""
        shapes: dict[GrowableShape, int] = {}
        params: dict[SamplingParams, int] = {}
        entries: list[Entry] = []
        memory: dict[str, list[Tensor]] = {}
        for job in jobs:
            log = self._logs[job.number]
            for name, rows in log.unsent_memory().items():
                memory.setdefault(name, []).append(rows)
            entries.append(
                Entry(
                    session=log.session,
                    drafter=self._name,
                    known=log.num_sent,
                    tokens=tuple(log.tokens[log.num_sent :]),
                    num_kept=log.num_kept,
                    root=job.root,
                    shape=shapes.setdefault(job.shape, len(shapes)),
                    params=params.setdefault(job.sampler.params, len(params)),
                    sequence=job.sampler.sequence,
                    num_target_layers=job.num_target_layers,
                    wants_scores=job.wants_scores,
                )
            )
        request = DraftRequest(
            number=self._num_requests,
            entries=tuple(entries),
            shapes=tuple(shapes),
            params=tuple(params),
            closed=tuple(self._closed_sessions.pop(endpoint, ())),
        )
        return pack(request, memory)

    # --- Replies ---

    def _wait_for(self, endpoint: Endpoint, logs: Sequence[SessionLog], deadline: float) -> None:
        """Take in replies of one drafter process until none of these sequences waits for it any more, or until the
        deadline."""
        while any(log.endpoint == endpoint and log.request is not None for log in logs):
            connection = self._connections.get(endpoint)
            seconds = max(0.0, deadline - time.monotonic())
            if connection is None or not self._receive(endpoint, connection, seconds):
                return

    def _poll(self, endpoint: Endpoint | None) -> Connection | None:
        """Take in the replies that have arrived, without waiting; return the connection if it is still open."""
        if endpoint is None:
            return None
        connection = self._connections.get(endpoint)
        while connection is not None and connection.num_pending and self._receive(endpoint, connection, 0.0):
            pass
        return self._connections.get(endpoint)

    def _receive(self, endpoint: Endpoint, connection: Connection, seconds: float) -> bool:
        """Take in the next reply; False if none arrives in time or the process is given up."""
        try:
            received = connection.receive(seconds)
            if received is None:
                return False
            reply, num_bytes = received
            self._breaker.reset(endpoint)
            self.stats.num_bytes_received += num_bytes
            self.stats.drafting_seconds += reply.seconds
            for job, drafted in connection.match(reply):
                self._take_in(job, drafted, reply)
        except UnreachableError:
            self._give_up(endpoint)
            return False
        except DataError as error:
            _LOGGER.warning("a drafter process sent a wrong reply and is given up: %s", error)
            self._give_up(endpoint)
            return False
        return True

    def _take_in(self, job: DraftJob, drafted: DraftedTree, reply: DraftReply) -> None:
        """Keep one draft, unless its sequence has ended or moved to another process meanwhile.

        Raises:
            DataError: the draft is not what was requested.
        """
        log = self._logs.get(job.number)
        if log is None or log.session != drafted.session or log.request != reply.number:
            return
        log.request = None
        if drafted.known != log.num_sent:  # the process has lost the session: the next request sends everything
            self.stats.num_misses += 1
            log.move_to(None)
        elif drafted.tokens:
            size = self._drafter.spec.vocab_size
            self._ready[job.number] = restored(drafted, self._device, job.root, job.shape, size)

    # --- Connections ---

    def _connected(self, endpoint: Endpoint) -> Connection:
        """The connection to a process, opened if there is none.

        Raises:
            UnreachableError: it cannot be opened.
        """
        if endpoint not in self._connections:
            self._close_dead_connections()
            self._connections[endpoint] = Connection(self._connect(endpoint))
        return self._connections[endpoint]

    def _close_dead_connections(self) -> None:
        """Close connections to processes that ended while they had no sequences."""
        used = {log.endpoint for log in self._logs.values()}
        for endpoint, connection in [*self._connections.items()]:
            if not connection.num_pending and endpoint not in used:
                self._receive(endpoint, connection, 0.0)

    def _give_up(self, endpoint: Endpoint) -> None:
        """Close the connection to a process; its sequences look for another one."""
        connection = self._connections.pop(endpoint, None)
        if connection is not None:
            connection.close()
        self._closed_sessions.pop(endpoint, None)
        self.stats.num_lost += 1
        self._breaker.add(endpoint)
        for log in self._logs.values():
            if log.endpoint == endpoint:
                log.move_to(None)
                log.request = None
                self._pool.lose(log.session)
