"""Put the application on a running cluster, with the code of this folder.

    python -m serve.deploy configs/serve/local.yaml
    ray job submit --runtime-env configs/runtime_env.yaml -- python -m serve.deploy configs/serve/cluster.yaml

Reads YAML files in Ray Serve's own schema, waits until the application runs, and leaves it running; `serve status` and
`serve shutdown` see to it. The same command again changes what differs: numbers of replicas without a restart.
`serve deploy FILE` does the same with the code that the nodes have installed.
"""

import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from moray.cluster.configs import RayConfig
from moray.config import Config, run_entry_point
from moray.errors import MorayError
from serve.config import read_args

_SENT_ALONG = ("working_dir", "py_modules", "env_vars")
_POLL_SECONDS = 0.5


class DeployConfig(Config):
    """Ray Serve's schema, and where to."""

    applications: tuple[dict[str, Any], ...] = Field(min_length=1)
    """name, route_prefix, import_path, args (`ServeConfig`) and deployments (overrides by name)."""
    http_options: dict[str, Any] = Field(default_factory=dict)
    proxy_location: str = "HeadOnly"
    logging_config: dict[str, Any] | None = None
    wait_seconds: float = Field(default=1800.0, gt=0)
    """For replicas to load their weights, and for nodes to start."""
    ray: RayConfig = RayConfig()


class DeployError(MorayError):
    """Ray Serve could not start the application."""


def main(config: DeployConfig) -> None:
    """Deploy, wait, and say where it answers."""
    import os

    from moray.cluster.session import ray_session

    _check(config)
    address = config.ray.address or os.environ.get("RAY_ADDRESS") or "auto"
    with ray_session(config.ray.model_copy(update={"address": address})):
        options = deploy(config).http_options
    print(f"running at http://{options.host}:{options.port}; serve shutdown ends it")


def deploy(config: DeployConfig) -> Any:
    """Deploy and wait where a connection to Ray is open; returns what Serve was told.

    Raises:
        DeployError: an application has failed, or is not ready in time.
    """
    _check(config)
    schema = _schema(config)
    _send(schema)
    for application in config.applications:
        _wait(application.get("name", "default"), config.wait_seconds)
    return schema


def _check(config: DeployConfig) -> None:
    """Say what is misspelt before anything starts."""
    for application in config.applications:
        read_args(application.get("args", {}))


def _schema(config: DeployConfig) -> Any:
    """What Serve is told: the file, and the code that this job has brought."""
    import ray
    from ray.serve.schema import ServeDeploySchema

    brought = ray.get_runtime_context().runtime_env
    environment = {key: brought[key] for key in _SENT_ALONG if key in brought}
    applications = [{"runtime_env": environment, **application} for application in config.applications]
    values = config.model_dump(exclude={"wait_seconds", "ray"}, exclude_none=True)
    return ServeDeploySchema.model_validate(values | {"applications": applications})


def _send(schema: Any) -> None:
    from ray.serve._private.api import serve_start

    client = serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        controller_options=schema.controller_options,
    )
    client.deploy_apps(schema)


def _wait(name: str, seconds: float) -> None:
    """Until the application runs.

    Raises:
        DeployError: it has failed, or is not ready in time.
    """
    from ray import serve

    deadline = time.monotonic() + seconds
    while True:
        application = serve.status().applications.get(name)
        state = application.status.value if application else "NOT_STARTED"
        if state == "RUNNING":
            return
        message = _messages(application) if application else ""
        if state == "DEPLOY_FAILED":  # what is unhealthy is being replaced
            raise DeployError(f"application '{name}' is {state}: {message}; `serve status` says more")
        if time.monotonic() > deadline:
            raise DeployError(
                f"application '{name}' is {state} after {seconds:g} s: {message or 'replicas are starting'}; it goes "
                "on starting: look with `serve status`, or give more wait_seconds"
            )
        time.sleep(_POLL_SECONDS)


def _messages(application: Any) -> str:
    """The last line of what Serve says of each part that is in trouble."""
    parts: Mapping[str, str] = {"": application.message} | {
        f"{name}: ": deployment.message
        for name, deployment in application.deployments.items()
        if deployment.status.value not in {"HEALTHY", "UPDATING"}
    }
    return "; ".join(f"{name}{text.strip().splitlines()[-1]}" for name, text in parts.items() if text.strip())


CONFIG = DeployConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main, again="the application goes on starting; `serve shutdown` ends it")
