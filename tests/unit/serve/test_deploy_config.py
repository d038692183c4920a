"""What `python -m serve.deploy` says of a file before anything starts, and where it listens by default."""

from typing import Any

import pytest

from moray.config import validate
from moray.errors import ConfigError
from serve.deploy import DeployConfig, _schema, deploy

APPLICATION = {"name": "moray", "import_path": "serve.app:build_app", "args": {"target": {"model": "x"}}}


def config_of(http_options: Any = None, **application: Any) -> DeployConfig:
    return validate(DeployConfig, {"applications": [APPLICATION | application], "http_options": http_options or {}})


def with_deployment(**values: Any) -> DeployConfig:
    return config_of(deployments=[{"name": "Gateway"}, {"name": "Target", **values}])


def with_pool(drafter: str | None, **args: Any) -> DeployConfig:
    args = {"target": {"model": "x"}} | args | ({} if drafter is None else {"drafters.d": drafter})
    return config_of(args=args, deployments=[{"name": "Drafter"}])


@pytest.fixture
def job(monkeypatch):
    """What Ray says of the job that deploys."""

    class Context:
        runtime_env: dict[str, Any] = {"working_dir": "gcs://code.zip", "pip": ["x"]}

    monkeypatch.setattr("ray.get_runtime_context", Context)


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ({}, "127.0.0.1", 8000),
        ({"port": 9000}, "127.0.0.1", 9000),
        ({"host": "0.0.0.0"}, "0.0.0.0", 8000),
    ],
)
def test_it_listens_on_loopback_unless_told_otherwise(job, given, host, port):
    schema = _schema(config_of(given))
    assert (schema.http_options.host, schema.http_options.port) == (host, port)
    assert schema.applications[0].runtime_env == {"working_dir": "gcs://code.zip"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            config_of({"hots": "127.0.0.1"}),
            "unknown key 'http_options.hots'; did you mean .host..; accepted are host, ",
        ),
        (config_of(route="/"), "unknown key 'applications.0.route'.*accepted are .*route_prefix"),
        (
            with_deployment(max_ongoing=5),
            "unknown key 'applications.0.deployments.1.max_ongoing'.*max_ongoing_requests",
        ),
        (
            with_deployment(autoscaling_config={"max_replica": 5}),
            r"unknown key 'applications.0.deployments.1.autoscaling_config.max_replica'; did you mean 'max_replicas'\?",
        ),
        (with_deployment(ray_actor_options={"gpus": 1}), "deployments.1.ray_actor_options.gpus'.*num_gpus"),
        (with_deployment(ray_actor_options=1), "'applications.0.deployments.1.ray_actor_options' is 1: a mapping"),
        (config_of(deployments=["Target"]), "'applications.0.deployments.0' is 'Target': a mapping of keys"),
        (config_of(deployments=5), "applications.0.deployments' is 5"),
        (config_of(deployments={"Target": {}}), "applications.0.deployments' is "),
        (config_of(args=5), "applications.0.args' is 5"),
        (config_of(import_path=None), "import_path"),
        (config_of({"port": "many"}), 'http_options.port\' is "many"'),
        (with_deployment(num_replicas="many"), "num_replicas"),
        (with_pool(None), "names 'Drafter', but args make no pool.*a drafter with weights"),
        (with_pool("{type: ngram}"), "names 'Drafter', but args make no pool"),
        (with_pool("x", placement="in_process"), r"no pool: that takes placement 'pool' \(it is 'in_process'\)"),
        (config_of(args={"target": {"modle": "x"}}), "unknown key 'target.modle'"),
    ],
)
def test_what_is_wrong_is_named_before_ray_is_asked(config, says):
    with pytest.raises(ConfigError, match=says):
        deploy(config)
