"""A request router for Ray Serve that keeps a session on its replica.

A new session goes to the less busy of two random replicas, and stays there for as long as that one lives; a session
named `NAME@REPLICA` goes to that replica and nowhere else while it lives. Calls without a session go to any.

Serve 2.60.0's base router indexes waiting calls by `internal_request_id`, which all calls made inside one request
share: of several, it forgets all but the first, which then wait for ever. That is also what its own routers that are
not first-in-first-out do. Here calls are indexed by their metadata, one object per call. The three methods that do so
are private to Serve, which is why Ray's version is pinned exactly; tests/ray/serving/test_sticky_router.py hangs
without them.
"""

import random
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class StickyRouter(RequestRouter):
    """Deployments name it in `request_router_config`; every process that calls them has one of its own."""

    def initialize_state(self, **kwargs: int) -> None:
        """Called by Serve with `request_router_kwargs`; of more than `max_sessions`, those used longest ago are
        forgotten."""
        self._replica_of: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = kwargs.get("max_sessions", 10_000)

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
                return [own]
            self._replica_of.pop(session, None)  # its replica is gone; the new one will say that it knows nothing
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember where a session is."""
        session = pending_request.metadata.session_id
        if not session or "@" in session:
            return
        self._replica_of[session] = replica_id.unique_id
        self._replica_of.move_to_end(session)
        while len(self._replica_of) > self._max_sessions:
            self._replica_of.popitem(last=False)

    # --- One index entry per call ---

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending_requests_by_id[id(pending_request.metadata)] = pending_request  # type: ignore[index]

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending_requests_by_id.pop(id(pending_request.metadata), None)  # type: ignore[call-overload]

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        pending = self._pending_requests_by_id.get(id(request_metadata))  # type: ignore[call-overload]
        return pending if pending is not None and not pending.future.done() else None
