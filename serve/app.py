"""The Serve application: wires up the gateway, target and drafter deployments.

    serve run serve.app:build_app target.model=runs/demo/target drafters.moa=runs/demo/moa
    serve run configs/serve/local.yaml

`python -m serve.deploy` deploys it on a cluster.
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
"""Seconds that a gateway being shut down has to finish its streams. They would be lost with it, whereas another target
can resume an answer whose target is shut down. An idle gateway stops at once."""

_REFUSED = 1000
"""Calls that a target replica accepts beyond those that run or wait in its engine. It refuses them at once, except for
answers resumed from another replica. Without this headroom they would wait in Serve's own queue, in arbitrary order."""

_WAITING = 1000
"""Requests that may wait in each Serve proxy for a gateway; Serve refuses more with 429."""


def build_app(args: dict[str, Any]) -> Application:
    """Bind target and gateway, and a drafter pool if any drafters are pooled.

    Raises:
        ConfigError: a value is not accepted, or a drafter cannot draft the tree.
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
        ray_actor_options={"num_cpus": 0},  # so that target and drafter fit on two cores
        **patient,
    )(serve.ingress()(Gateway))
    targets = target(TargetReplica).bind(config, pool, RaySink(), ends_process=True)
    return gateway.bind(config, targets, RaySink(), RayExporters())
