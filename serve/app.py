"""The Serve application: three deployments and who talks to whom. Wiring only.

serve run serve.app:build_app config=configs/serve/local.yaml
serve deploy configs/serve/local.yaml
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from moray.config import validate
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
from serve.gateway import Gateway
from serve.metrics.ray_sink import RaySink
from serve.target import TargetReplica

_STICKY = RequestRouterConfig(request_router_class="moray.cluster.sticky_router:StickyRouter")  # type: ignore[arg-type]


def build_app(args: dict[str, Any]) -> Application:
    """Target and gateway, and a pool of drafters between them if there are any."""
    config = validate(ServeConfig, args)
    most = config.engine.max_sequences + config.max_waiting
    pool = None
    if config.drafters and config.placement == "pool":
        pool = serve.deployment(
            name="Drafter", max_ongoing_requests=1000, request_router_config=_STICKY, graceful_shutdown_timeout_s=10
        )(DrafterReplica).bind(config, sink=RaySink())
    target = serve.deployment(
        name="Target",
        max_ongoing_requests=most,
        max_queued_requests=most,
        request_router_config=_STICKY,
        graceful_shutdown_timeout_s=10,
    )(TargetReplica).bind(config, pool, RaySink())
    gateway = serve.deployment(name="Gateway", max_ongoing_requests=1000)(serve.ingress()(Gateway))
    return gateway.bind(config, target, RaySink())
