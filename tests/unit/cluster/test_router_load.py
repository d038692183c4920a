"""Whom the router of our deployments asks first: by the calls that replicas have, those just chosen among them."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve._private.request_router.common import ReplicaQueueLengthCache

from moray.cluster import sticky_router
from moray.cluster.sticky_router import StickyRouter


class Router(StickyRouter):
    """The policy alone: nothing is sent."""

    def __init__(self, names: str) -> None:
        self._replica_queue_len_cache = ReplicaQueueLengthCache()
        self._use_replica_queue_len_cache = True
        self.initialize_state()
        self.replicas = [SimpleNamespace(replica_id=SimpleName(name)) for name in names]

    def order(self) -> str:
        """The replicas' names in the order in which one more call would try them; the first is chosen."""
        ranks = asyncio.run(self.choose_replicas(self.replicas))
        assert all(len(rank) == 1 for rank in ranks)
        return "".join(rank[0].replica_id.unique_id for rank in ranks)

    def _update_router_queue_len_gauge(self, replica_id, num_calls):
        pass

    def end(self, name: str) -> None:
        """A call has ended."""
        self.on_request_completed(SimpleName(name), "")
        self.decrement_queue_len_cache(SimpleName(name))

    def call(self) -> str:
        """Send one call; returns to whom."""
        name = self.order()[0]
        self.on_send_request(SimpleName(name))
        return name


class SimpleName(str):
    """A replica's id."""

    @property
    def unique_id(self) -> str:
        return str(self)


@pytest.fixture
def now(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sticky_router, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_calls_chosen_at_the_same_instant_are_spread_evenly(now):
    router = Router("abc")
    chosen = "".join(router.order()[0] for _ in range(9))
    assert sorted(chosen) == list("aaabbbccc")


def test_all_replicas_are_tried(now):
    """The first ones may be full of calls that this process knows nothing of."""
    router = Router("abcd")
    assert [sorted(router.order()) for _ in range(3)] == [list("abcd")] * 3


def test_who_has_fewer_calls_comes_first(now):
    router = Router("ab")
    for _ in range(6):
        router.call()
    for _ in range(2):
        router.end("b")
    assert [router.call() for _ in range(2)] == ["b", "b"]
    assert {router.call() for _ in range(2)} == {"a", "b"}


def test_calls_of_other_processes_count_as_far_as_they_are_known(now):
    router = Router("ab")
    router._replica_queue_len_cache.update(SimpleName("a"), 5)
    assert [router.call() for _ in range(5)] == ["b"] * 5
    assert {router.call() for _ in range(2)} == {"a", "b"}


def test_what_was_chosen_and_never_sent_is_forgotten(now):
    router = Router("ab")
    chosen = router.order()[0]
    now[0] += 0.5
    assert router.order()[0] != chosen
    now[0] += 0.6
    assert router.order()[0] == chosen, "the first choice has been given up, the second has not"


def test_an_end_without_a_beginning_counts_for_nothing(now):
    router = Router("ab")
    router.end("a")
    assert sorted(router.call() for _ in range(4)) == list("aabb")
