"""The router of our deployments: sessions stay where they are, and calls made side by side in a request all return."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import unfixed_router
from ray import cloudpickle

STICKY = "moray.cluster.sticky_router:StickyRouter"
NUM_CALLS = 24


@pytest.fixture
def ask(ray_session, free_app):
    """Let one request make many calls at once to three replicas, as sessions; returns who answered each."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    def deploy(router_class, name):
        class Callee:
            async def who(self, seconds):
                await asyncio.sleep(seconds)
                return serve.get_replica_context().replica_id.unique_id

        class Caller:
            def __init__(self, callee):
                self._callee = callee

            async def ask(self, sessions, seconds):
                calls = [self._callee.options(session_id=session).who.remote(seconds) for session in sessions]
                return await asyncio.gather(*calls)

        options = {"ray_actor_options": {"num_cpus": 0}}
        callee = serve.deployment(
            name="Callee",
            num_replicas=3,
            max_ongoing_requests=100,
            request_router_config=RequestRouterConfig(request_router_class=router_class),
            **options,
        )(Callee)
        handle = serve.run(
            serve.deployment(name="Caller", **options)(Caller).bind(callee.bind()), name=name, route_prefix=f"/{name}"
        )
        handle._init(_run_router_in_separate_loop=True)  # here is none
        return lambda sessions, seconds=30, lasts=0.01: handle.ask.remote(sessions, lasts).result(timeout_s=seconds)

    return deploy


@pytest.fixture
def free_app():
    yield
    from ray import serve

    serve.shutdown()


@pytest.mark.slow
def test_sessions_stay_and_siblings_return(ask):
    """Twenty-four calls inside one request: without the router's own index all but the first would wait for ever."""
    call = ask(STICKY, "sticky")
    sessions = [f"session-{number}" for number in range(NUM_CALLS)]
    first = call(sessions, lasts=2.0)
    # How evenly depends on how fast new replicas answer; the choice is tested in unit/cluster/test_router_load.py.
    assert len(set(first)) == 3, Counter(first)
    for _ in range(3):
        assert call(sessions) == first
    replica = first[0]
    assert set(call([f"any-{number}@{replica}" for number in range(NUM_CALLS)])) == {replica}
    assert len(call([""] * NUM_CALLS)) == NUM_CALLS, "calls without a session return too"
    with ThreadPoolExecutor(2) as threads:
        busy = threads.submit(call, [f"long-{number}@{replica}" for number in range(8)], lasts=4.0)
        time.sleep(1.0)
        later = Counter(call([f"later-{number}" for number in range(8)]))
        assert replica not in later, "it has more calls than the others come to"
        assert set(busy.result()) == {replica}
    last = Counter(call([f"last-{number}" for number in range(NUM_CALLS)], lasts=2.0))
    assert len(last) == 3, last


@pytest.mark.soak
def test_without_the_index_of_our_own_siblings_hang(ask):
    """The defect of Ray 2.60 that the router works around; once this fails, three methods can go."""
    cloudpickle.register_pickle_by_value(unfixed_router)  # the replicas cannot import it
    call = ask("unfixed_router:UnfixedRouter", "unfixed")
    assert len(call(["alone"])) == 1
    with pytest.raises(TimeoutError):
        call([f"session-{number}" for number in range(NUM_CALLS)], 5)
