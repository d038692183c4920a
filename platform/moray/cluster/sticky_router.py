"""A request router for Ray Serve that keeps a session on its replica.

A new session goes to the replica that has the fewest calls, and stays there for as long as that one lives; a session
named `NAME@REPLICA` goes to that replica and nowhere else while it lives. Calls without a session go where a new one
would.

Serve's own count of a replica's calls has those of other processes, but is late for what is made at the same instant:
places are chosen before any of it is counted, and of sixteen leases on two drafters twelve came to one. So the calls of
this process are counted here as well, from the choice on.

Serve 2.60.0's base router indexes waiting calls by `internal_request_id`, which all calls made inside one request
share: of several, it forgets all but the first, which then wait for ever. That is also what its own routers that are
not first-in-first-out do. Here calls are indexed by their metadata, one object per call. The three methods that do so
are private to Serve, which is why Ray's version is pinned exactly; tests/ray/serving/test_sticky_router.py hangs
without them.
"""

import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

_MAX_SECONDS = 1.0
"""Between choosing a replica for a call and sending it: what takes longer was sent elsewhere, or given up."""


class _Load:
    """How many calls of this process each replica has: sent and not ended, or about to be sent."""

    def __init__(self) -> None:
        self._sent: Counter[ReplicaID] = Counter()
        self._chosen: defaultdict[ReplicaID, deque[float]] = defaultdict(deque)
        """When it was chosen for calls that have not been sent."""

    def of(self, replica: ReplicaID) -> int:
        chosen, now = self._chosen[replica], time.monotonic()
        while chosen and chosen[0] < now - _MAX_SECONDS:
            chosen.popleft()
        return self._sent[replica] + len(chosen)

    def choose(self, replica: ReplicaID) -> None:
        self._chosen[replica].append(time.monotonic())

    def send(self, replica: ReplicaID) -> None:
        if self._chosen[replica]:
            self._chosen[replica].popleft()
        self._sent[replica] += 1

    def end(self, replica: ReplicaID) -> None:
        self._sent[replica] = max(0, self._sent[replica] - 1)

    def keep(self, replicas: Collection[ReplicaID]) -> None:
        """Forget all others."""
        self._sent = Counter({replica: self._sent[replica] for replica in replicas})
        self._chosen = defaultdict(deque, {replica: self._chosen[replica] for replica in replicas})


class StickyRouter(RequestRouter):
    """Deployments name it in `request_router_config`; every process that calls them has one of its own."""

    def initialize_state(self, **kwargs: int) -> None:
        """Called by Serve with `request_router_kwargs`; of more than `max_sessions`, those used longest ago are
        forgotten."""
        self._replica_of: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = kwargs.get("max_sessions", 10_000)
        self._load = _Load()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Whom to ask, in order of preference."""
        if not candidate_replicas:
            return []
        session = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or it would ask full replicas without a pause
            session = pending_request.metadata.session_id
        if session:
            wanted = session.rpartition("@")[2] if "@" in session else self._replica_of.get(session)
            own = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
            if own:
                self._load.choose(own[0].replica_id)
                return [own]
            self._replica_of.pop(session, None)  # its replica is gone; the new one will say that it knows nothing
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        by_load = sorted(shuffled, key=lambda replica: self._num_calls(replica.replica_id))
        self._load.choose(by_load[0].replica_id)
        return [[replica] for replica in by_load]

    def _num_calls(self, replica: ReplicaID) -> int:
        """As far as is known: of this process, or of all when its queue was heard of last."""
        return max(self._load.of(replica), self.replica_queue_len_cache.get(replica) or 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where a session is."""
        session = pending_request.metadata.session_id
        if not session or "@" in session:
            return
        self._replica_of[session] = replica_id.unique_id
        self._replica_of.move_to_end(session)
        while len(self._replica_of) > self._max_sessions:
            self._replica_of.popitem(last=False)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Serve when it has sent a call."""
        super().on_send_request(replica_id)
        self._load.send(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a call has ended, however it did."""
        super().on_request_completed(replica_id, internal_request_id)
        self._load.end(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when there are others."""
        super().update_replicas(replicas)
        self._load.keep({replica.replica_id for replica in replicas})

    # --- One index entry per call ---

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending_requests_by_id[id(pending_request.metadata)] = pending_request  # type: ignore[index]

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending_requests_by_id.pop(id(pending_request.metadata), None)  # type: ignore[call-overload]

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        pending = self._pending_requests_by_id.get(id(request_metadata))  # type: ignore[call-overload]
        return pending if pending is not None and not pending.future.done() else None
