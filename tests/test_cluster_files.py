"""The files that put Moray on a cluster: each is what its reader takes, and they agree with each other."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from kuberay_schema import SCHEMAS
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema
from serve_environment import VARIABLES

from moray.config import load_config, read_yaml
from pipelines import distill
from serve.config import ServeConfig, read_args
from serve.deploy import DeployConfig

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CONFIGS / "kuberay").glob("ray*.yaml"))}
RUNTIME_ENV = read_yaml(CONFIGS / "runtime_env.yaml")
SERVE = {path.stem: path for path in sorted((CONFIGS / "serve").glob("*.yaml"))}
DEPLOYMENTS = {"Gateway", "Target", "Drafter"}


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The cluster that a manifest asks for."""
    spec = manifest["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def check_application(values: dict[str, Any]) -> ServeConfig:
    """Serve's own reading of a file, then ours of its arguments."""
    schema = ServeDeploySchema.model_validate(values)
    (application,) = schema.applications
    assert application.import_path == "serve.app:build_app"
    assert {deployment.name for deployment in application.deployments} <= DEPLOYMENTS
    return read_args(application.args)


@pytest.mark.parametrize("name", SERVE)
def test_a_serve_file_is_read_by_serve_and_by_us(name):
    check_application(yaml.safe_load(SERVE[name].read_text()))
    assert load_config(DeployConfig, [str(SERVE[name])]).http_options["host"] == "127.0.0.1"


def test_each_pool_is_scaled_by_its_own_load():
    values = read_yaml(SERVE["cluster"])
    config = check_application(values)
    schema = ServeDeploySchema.model_validate(values)
    pools = {deployment.name: deployment for deployment in schema.applications[0].deployments}
    assert set(pools) == DEPLOYMENTS
    places = config.engine.max_num_seqs + config.max_waiting
    assert pools["Target"].max_queued_requests == places
    assert pools["Target"].max_ongoing_requests == places + 1000, "whom it has no place for it refuses itself"
    assert pools["Target"].autoscaling_config["target_ongoing_requests"] < config.engine.max_num_seqs
    assert pools["Target"].ray_actor_options.num_gpus == 1
    assert 0 < pools["Drafter"].ray_actor_options.num_gpus < 1
    assert pools["Drafter"].autoscaling_config["max_replicas"] > 1


def test_ray_takes_the_cluster_of_machines():
    config = prepare_config(yaml.safe_load((CONFIGS / "clusters" / "vm.yaml").read_text()))
    validate_config(config)
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        start = commands[-1]
        assert "RAY_AUTH_MODE=token" in start
        assert "MORAY_RUNS=/shared/runs" in start
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]
    torch, wheel = (command for command in config["setup_commands"] if "pip install" in command)
    assert torch.endswith("-c ~/moray/constraints.txt torch")
    assert "-c ~/moray/constraints.txt" in wheel


@pytest.mark.parametrize("path", ["clusters/vm.yaml", "kuberay/Dockerfile"])
def test_serve_is_as_fast_on_clusters(path):
    faster = [f"{name}={value}" for name, value in VARIABLES.items() if name.startswith("RAY_SERVE_")]
    assert len(faster) == 4
    text = (CONFIGS / path).read_text()
    starts = text.count("ray start ") if path.endswith(".yaml") else 1
    assert all(text.count(line) == starts for line in faster)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_what_the_operator_takes(name):
    manifest = MANIFESTS[name]
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    assert read_yaml(CONFIGS / "kuberay" / f"{name}.yaml") == manifest
    cluster = cluster_of(manifest)
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "MORAY_RUNS", "value": "/runs"} in container["env"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
        claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]]
        assert read_yaml(CONFIGS / "kuberay" / "runs-volume.yaml")["metadata"]["name"] in claims
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_a_misspelt_field_of_a_manifest_shows():
    wrong = yaml.safe_load(json.dumps(MANIFESTS["raycluster"]))
    wrong["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(wrong, SCHEMAS["RayCluster"])


def test_the_job_s_command_is_one(monkeypatch):
    spec = MANIFESTS["rayjob"]["spec"]
    python, flag, module, *words = shlex.split(spec["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "pipelines.distill")
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("MORAY_RUNS", "/runs")
    assert load_config(distill.CONFIG, words).output == "/runs/llama-3-8b/moa"
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert environment["env_vars"] == RUNTIME_ENV["env_vars"]
    dockerfile = (CONFIGS / "kuberay" / "Dockerfile").read_text()
    assert f"WORKDIR {environment['working_dir'].removeprefix('local://')}" in dockerfile
    assert all(f" {name} {name}\n" in dockerfile for name in ("platform", "pipelines", "serve", "sweeps", "configs"))


def test_the_service_is_the_application_of_the_cluster_file():
    service, plain = yaml.safe_load(MANIFESTS["rayservice"]["spec"]["serveConfigV2"]), read_yaml(SERVE["cluster"])
    config = check_application(service)
    assert config.api.api_keys_file, "who can reach the pods must have a key"
    (application,) = service["applications"]
    assert application.pop("runtime_env") == yaml.safe_load(MANIFESTS["rayjob"]["spec"]["runtimeEnvYAML"])
    application["args"].pop("api")
    wanted = {}
    for deployment in application["deployments"]:
        wanted |= deployment["ray_actor_options"].pop("resources", {})
    service["http_options"]["host"] = plain["http_options"]["host"]
    assert service == plain
    offered: dict[str, float] = {}
    for group in cluster_of(MANIFESTS["rayservice"])["workerGroupSpecs"]:
        offered |= json.loads(json.loads(group["rayStartParams"]["resources"]))
    assert set(wanted) == set(offered)
    assert all(wanted[name] <= offered[name] for name in wanted)
