"""The Serve application: three deployments and who talks to whom. Wiring only.

    serve run serve.app:build_app target.model=runs/demo/target drafters.moa=runs/demo/moa
    serve run configs/serve/local.yaml

`python -m serve.deploy` puts it on a cluster.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve.config import read_args
from serve.drafter import DrafterReplica
from serve.gateway import Gateway
from serve.target import TargetReplica

_STICKY = RequestRouterConfig(request_router_class="moray.cluster.sticky_router:StickyRouter")  # type: ignore[arg-type]


def build_app(args: dict[str, Any]) -> Application:
    """Target and gateway, and a pool of drafters between them if there are any."""
    config = read_args(args)
    most = config.engine.max_sequences + config.max_waiting
    pool = None
    if config.drafters and config.placement == "pool":
        pool = serve.deployment(
            name="Drafter", max_ongoing_requests=1000, request_router_config=_STICKY, graceful_shutdown_timeout_s=10
        )(DrafterReplica).bind(config)
    target = serve.deployment(
        name="Target",
        max_ongoing_requests=most,
        max_queued_requests=most,
        request_router_config=_STICKY,
        graceful_shutdown_timeout_s=10,
    )(TargetReplica).bind(config, pool)
    gateway = serve.deployment(name="Gateway", max_ongoing_requests=1000)(serve.ingress()(Gateway))
    return gateway.bind(config, target)
