"""Deploy the application on a running cluster, with the code in this folder.

    python -m serve.deploy configs/serve/local.yaml
    ray job submit --runtime-env configs/runtime_env.yaml -- python -m serve.deploy configs/serve/cluster.yaml

Reads YAML files in Ray Serve's schema, waits until the application runs, and leaves it running; use `serve status` and
`serve shutdown` to manage it. Run the command again to apply changes; numbers of replicas change without a restart.
`serve deploy FILE` does the same with the code installed on the nodes.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from moray.cluster.configs import RayConfig
from moray.config import Config, run_entry_point
from moray.errors import ConfigError, MorayError
from moray.explain import did_you_mean, explain, one_line
from moray.progress import Progress
from serve.config import read_args

_SENT_ALONG = ("working_dir", "py_modules", "env_vars")
_LOOPBACK = {"host": "127.0.0.1"}
"""Ray's own default is to listen on all addresses."""
_POLL_SECONDS = 0.5


class DeployConfig(Config):
    """Ray Serve's deployment schema, with the cluster to deploy on."""

    applications: tuple[dict[str, Any], ...] = Field(min_length=1)
    """Applications: name, route_prefix, import_path, args (keys of ServeConfig) and deployments."""
    http_options: dict[str, Any] = Field(default_factory=dict)
    """Ray Serve's HTTP options: host, port and more; the default host is loopback."""
    proxy_location: str = "HeadOnly"
    """Nodes that run an HTTP proxy: HeadOnly, EveryNode or Disabled. If Ray Serve already runs, its setting stays."""
    logging_config: dict[str, Any] | None = None
    """Ray Serve's logging options for all applications; null for Ray Serve's defaults."""
    wait_seconds: float = Field(default=1800.0, gt=0)
    """Maximum seconds to wait for nodes to start and replicas to load their weights."""
    ray: RayConfig = RayConfig()


class DeployError(MorayError):
    """Ray Serve could not start the application."""


def main(config: DeployConfig) -> None:
    """Deploy, wait until the application runs, and print its address."""
    import os

    from moray.cluster.session import ray_session

    _check(config)
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        ray = config.ray
    else:
        ray = config.ray.model_copy(update={"address": "auto"})
    with ray_session(ray):
        options = deploy(config).http_options
    print(f"running at http://{options.host}:{options.port}; serve shutdown ends it")


def deploy(config: DeployConfig) -> Any:
    """Deploy and wait, over an open connection to Ray; returns the schema that was sent to Serve.

    Raises:
        ConfigError: a key or value is not accepted; the message names it.
        DeployError: an application has failed, or is not ready in time.
    """
    _check(config)
    schema = _schema(config)
    _send(schema, _LOOPBACK | config.http_options)
    for application in config.applications:
        name = application.get("name", "default")
        with Progress(f"wait for the replicas of '{name}'") as progress:
            _wait(name, config.wait_seconds, progress)
    return schema


def _check(config: DeployConfig) -> None:
    """Report misspelt keys before anything starts, because Ray ignores unknown ones."""
    from ray.serve import schema

    _check_keys("http_options", config.http_options, schema.HTTPOptionsSchema)
    for number, application in enumerate(config.applications):
        _check_keys(f"applications.{number}", application, schema.ServeApplicationSchema)
        deployments = application.get("deployments")
        for index, deployment in enumerate(deployments if isinstance(deployments, list | tuple) else ()):
            _check_deployment(f"applications.{number}.deployments.{index}", deployment)
    try:
        schema.ServeDeploySchema.model_validate(_values(config, {}))
    except ValidationError as error:
        raise ConfigError(explain(schema.ServeDeploySchema, error)) from None
    for number, application in enumerate(config.applications):
        names = {deployment.get("name") for deployment in application.get("deployments") or ()}
        args = read_args(application.get("args", {}))
        if args.drafters:
            from serve.trees import check_trees  # imports torch

            check_trees(args)
        if not args.pooled and "Drafter" in names:
            raise ConfigError(
                f"applications.{number}.deployments names 'Drafter', but args make no pool: that takes "
                f"placement 'pool' (it is '{args.placement}') and a drafter with weights; or leave that deployment out"
            )


def _check_deployment(where: str, deployment: Any) -> None:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema

    _check_keys(where, deployment, DeploymentSchema)
    for key, schema in {"autoscaling_config": AutoscalingConfig, "ray_actor_options": RayActorOptionsSchema}.items():
        if deployment.get(key) is not None:
            _check_keys(f"{where}.{key}", deployment[key], schema)


def _check_keys(where: str, values: Any, schema: type[BaseModel]) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"'{where}' is {values!r:.80}: a mapping of keys is needed")
    for key in values:
        if key not in schema.model_fields:
            names = list(schema.model_fields)
            nearest = did_you_mean(str(key), names)
            raise ConfigError(f"unknown key '{where}.{key}'{nearest}; accepted are {', '.join(names)}")


def _schema(config: DeployConfig) -> Any:
    """The schema for Serve: the file's contents, with this job's runtime environment."""
    import ray
    from ray.serve.schema import ServeDeploySchema

    brought = ray.get_runtime_context().runtime_env
    environment = {key: brought[key] for key in _SENT_ALONG if key in brought}
    return ServeDeploySchema.model_validate(_values(config, environment))


def _values(config: DeployConfig, environment: Mapping[str, Any]) -> dict[str, Any]:
    applications = [{"runtime_env": environment, **application} for application in config.applications]
    values = config.model_dump(exclude={"wait_seconds", "ray"}, exclude_none=True)
    return values | {"applications": applications, "http_options": _LOOPBACK | config.http_options}


def _send(schema: Any, named: Mapping[str, Any]) -> None:
    """Start Serve if it is not running, and send it the applications.

    Raises:
        ConfigError: Serve already runs with HTTP options that differ from `named`, which it would ignore.
        DeployError: Serve does not start.
    """
    import ray.exceptions
    from ray import serve
    from ray.serve._private.api import serve_start  # as `serve deploy` of Ray 2.60 does; no public API sends a schema

    options = schema.http_options
    try:
        client = serve_start(
            http_options=options.model_dump(),
            proxy_location=schema.proxy_location,
            controller_options=schema.controller_options,
        )
    except (ray.exceptions.RayError, RuntimeError, TimeoutError) as error:
        serve.shutdown()  # otherwise Serve would stay up without a proxy and keep these options
        said = str(getattr(error, "cause", error))
        if "failed to bind" in said.lower():
            where = f"{options.host}:{options.port}"
            raise DeployError(
                f"http_options.port is {options.port}, but Ray Serve cannot listen at {where}, most likely because "
                "another program does: end that one, or give another port"
            ) from None
        raise DeployError(f"Ray Serve does not start: {one_line(said)}") from None
    running = client.http_config
    for name, value in named.items():
        if (current := getattr(running, name)) != value:
            raise ConfigError(
                f"http_options.{name} is {value!r}, but Ray Serve runs on this cluster with {current!r} and cannot "
                "change it while it runs: give that, or run `serve shutdown -y` first, which ends all applications"
            )
    client.deploy_apps(schema)


def _wait(name: str, seconds: float, progress: Progress) -> None:
    """Wait until the application runs.

    Raises:
        DeployError: the application has failed, or is not ready in time.
    """
    from ray import serve

    deadline, told = time.monotonic() + seconds, ""
    while True:
        application = serve.status().applications.get(name)
        state = application.status.value if application else "NOT_STARTED"
        if state == "RUNNING":
            return
        message = _messages(application) if application else ""
        if state == "DEPLOY_FAILED":  # keep waiting if it is only unhealthy: Serve replaces unhealthy replicas
            raise DeployError(f"application '{name}' is {state}: {message}; `serve status` says more")
        if time.monotonic() > deadline:
            raise DeployError(
                f"application '{name}' is {state} after {seconds:g} s: {message or 'replicas are starting'}; it goes "
                "on starting: look with `serve status`, or give more wait_seconds"
            )
        if message and message != told:
            print(f"waiting: {message}", file=sys.stderr, flush=True)
            told = message
        progress.update(note=_states(application) if application else "")
        time.sleep(_POLL_SECONDS)


def _states(application: Any) -> str:
    """The number of replicas per deployment and state."""
    return ", ".join(
        f"{name} {' '.join(f'{count} {state.lower()}' for state, count in deployment.replica_states.items())}"
        for name, deployment in application.deployments.items()
        if deployment.replica_states
    )


def _messages(application: Any) -> str:
    """The last line of Serve's message for the application and for each deployment that is not healthy."""
    parts: Mapping[str, str] = {"": application.message} | {
        f"{name}: ": deployment.message
        for name, deployment in application.deployments.items()
        if deployment.status.value != "HEALTHY"
    }
    return "; ".join(f"{name}{text.strip().splitlines()[-1]}" for name, text in parts.items() if text.strip())


CONFIG = DeployConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main, again="the application keeps starting; `serve shutdown` ends it")
