"""Ray Serve for one benchmark alone: when the benchmark ends, Serve ends with all its applications."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moray.cluster.configs import RayConfig
from moray.errors import ConfigError


def check_own_ray(config: RayConfig) -> None:
    """Called before `ray_session`: a benchmark that ends Serve joins no cluster, where others may have applications.

    Raises:
        ConfigError: `config` or RAY_ADDRESS names a cluster.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return  # which `ray_session` joins whatever the address; `own_serve` looks at what runs there
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address:
        name = "ray.address" if config.address else "RAY_ADDRESS"
        raise ConfigError(
            f"{name} is '{address}', but this benchmark deploys on a Ray of its own and ends Serve afterwards: leave "
            "the address out"
        )


@contextmanager
def own_serve() -> Iterator[None]:
    """Serve within an open session; ended afterwards in any case.

    Raises:
        ConfigError: it runs there already.
    """
    from ray import serve

    status = serve.status()
    if status.applications or status.proxies:
        names = ", ".join(status.applications) or "none yet"
        raise ConfigError(
            f"Serve runs on this Ray already (applications: {names}), and a benchmark would end it: shut it down, or "
            "measure on a Ray of its own"
        )
    try:
        yield
    finally:
        serve.shutdown()
