"""The Serve application: three deployments and who talks to whom. Wiring only.

    serve run serve.app:build_app target.model=runs/demo/target drafters.moa=runs/demo/moa
    serve run configs/serve/local.yaml

`python -m serve.deploy` puts it on a cluster.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig

from serve.config import read_args
from serve.drafter import DrafterReplica
from serve.gateway import Gateway
from serve.metrics.exporters import RayExporters
from serve.metrics.ray_sink import RaySink
from serve.target import TargetReplica
from serve.trees import check_trees

_COMMON: dict[str, Any] = {
    "request_router_config": RequestRouterConfig(request_router_class="moray.cluster.sticky_router:StickyRouter"),  # type: ignore[arg-type]
    "graceful_shutdown_timeout_s": 10,
    "health_check_period_s": 2,
}

_LAST_ANSWERS_SECONDS = 120
"""That a gateway may take to send what it has begun when it is to go: its streams end with it, while an answer whose
target goes is taken up by another. One that has nothing left goes at once."""

_REFUSED = 1000
"""Calls that a target replica may have beyond those that run and wait in it: it refuses them at once, but for answers
that another replica had begun. In Serve's own queue, which a full replica would leave them to, they would wait for a
place as well, and not in their order."""

_WAITING = 1000
"""Requests that may wait in each of Serve's proxies for a place in a gateway; Serve refuses more with 429."""


def build_app(args: dict[str, Any]) -> Application:
    """Target and gateway, and a pool between them if there are drafters for one.

    Raises:
        ConfigError: a value that is not accepted, or a tree that a drafter cannot draft.
    """
    config = read_args(args)
    check_trees(config)
    most = config.engine.max_num_seqs + config.max_waiting
    pool = None
    if config.pooled:
        drafter = serve.deployment(name="Drafter", max_ongoing_requests=1000, **_COMMON)(DrafterReplica)
        pool = drafter.bind(config, sink=RaySink())
    target = serve.deployment(name="Target", max_ongoing_requests=most + _REFUSED, max_queued_requests=most, **_COMMON)
    patient: dict[str, Any] = _COMMON | {"graceful_shutdown_timeout_s": _LAST_ANSWERS_SECONDS}
    gateway = serve.deployment(
        name="Gateway",
        max_ongoing_requests=1000,
        max_queued_requests=_WAITING,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        ray_actor_options={"num_cpus": 0},  # two cores are enough for a target and a drafter beside it
        **patient,
    )(serve.ingress()(Gateway))
    targets = target(TargetReplica).bind(config, pool, RaySink(), ends_process=True)
    return gateway.bind(config, targets, RaySink(), RayExporters())
