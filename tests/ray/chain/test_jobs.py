"""Pipelines, sweeps and the application as jobs of a cluster with token authentication."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_cluster import REPOSITORY, RayCluster, free_port
from tiny_sweeps import write_distill, write_questions

from moray.provenance import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WHERE = """
import ray
from moray.cluster.configs import RayConfig
from moray.cluster.session import ray_session

@ray.remote
def where():
    import os, moray, pipelines
    return [moray.__file__, pipelines.__file__, os.environ["RAY_DATA_USE_DATASOURCE_V2"], len(ray.nodes())]

with ray_session(RayConfig()):
    print("found", *ray.get(where.remote()))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One for all tests of this module."""
    running = RayCluster(tmp_path_factory.mktemp("shared") / "runs")
    yield running
    running.close()


@pytest.fixture(scope="module")
def target(cluster: RayCluster, tiny_target: Path) -> str:
    """The tiny target in the shared folder."""
    cluster.runs.mkdir()
    (cluster.runs / "target").symlink_to(tiny_target)
    return "target.model=runs/target"


@pytest.fixture(scope="module")
def drafter(cluster: RayCluster, target: str, tiny_cache: Path) -> str:
    """A drafter distilled by a job."""
    (cluster.runs / "cache").symlink_to(tiny_cache)
    distill = write_distill(cluster.runs, Path("runs/target"), Path("runs/cache"), max_steps=12)
    assert "runs/cache" in distill.read_text()
    distilled = cluster.submit("python", "-m", "pipelines.distill", "runs/distill.yaml", "output=runs/moa")
    assert distilled.returncode == 0, distilled.stdout + distilled.stderr
    assert f"drafter: {cluster.runs}/moa" in distilled.stdout
    moved = r"^distill \w+: 12 of 12 updates, after [\d:]+; loss [\d.]+ acc [\d.]+ tau [\d.]+$"
    assert re.search(moved, distilled.stdout, re.MULTILINE), distilled.stdout
    return "runs/moa"


def ask(port: int, prefix: str = "") -> str:
    """One question over HTTP."""
    body = {"model": "target", "temperature": 0, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{prefix}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def serve_file(folder: Path, port: int, drafter: str, **application: Any) -> Path:
    """configs/serve/local.yaml for the tiny target."""
    config = yaml.safe_load((REPOSITORY / "configs" / "serve" / "local.yaml").read_text())
    config["http_options"]["port"] = port
    args = {"target": {"model": "runs/target"}, "drafters": {"moa": drafter}, "threads": 1}
    config["applications"][0] |= {"args": args} | application
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def wait_for(cluster: RayCluster, ready: Callable[[str], bool], seconds: float = 200) -> None:
    """Ask Serve for its status until it is as it should be."""
    deadline = time.monotonic() + seconds
    while not ready(status := cluster.run("serve", "status").stdout):
        assert time.monotonic() < deadline, status
        time.sleep(3)  # every call starts a Python process that imports Ray


def runs(alone: bool, status: str) -> bool:
    """Whether the application runs, with or without a pool of drafters."""
    return "status: RUNNING" in status and ("Drafter:" not in status) == alone


def end_serve(cluster: RayCluster) -> None:
    """As an operator does."""
    ended = cluster.run("serve", "shutdown", "--yes")
    assert ended.returncode == 0, ended.stderr
    wait_for(cluster, lambda status: "RUNNING" not in status)


def test_who_has_no_token_is_refused(cluster):
    for changes in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}):
        refused = cluster.submit("echo", "done", **changes)
        assert refused.returncode != 0
        assert "AuthenticationError" in refused.stderr
    for path in ("/api/jobs/", "/api/serve/applications/"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            cluster.get(path)


def test_a_job_runs_the_code_that_was_sent_on_the_cluster_that_is_there(cluster):
    job = cluster.submit("python", "-c", WHERE)
    found = next(line for line in job.stdout.splitlines() if line.startswith("found ")).split()
    assert "working_dir_files" in found[1]
    assert found[1].endswith("/platform/moray/__init__.py")
    assert "working_dir_files" in found[2]
    assert found[3:] == ["0", "1"]


@pytest.mark.parametrize("setting", ["output=runs/lost", pytest.param("output=lost", marks=pytest.mark.soak)])
def test_a_job_does_not_write_where_its_output_would_be_lost(cluster, setting):
    words = ["python", "-m", "pipelines.distill", "configs/drafters/moa-demo.yaml", "target.model=x", setting]
    job = cluster.submit("env", "-u", "MORAY_RUNS", *words)
    assert job.returncode != 0
    assert "which is removed with the job: set MORAY_RUNS to a folder that all nodes share" in job.stdout + job.stderr


@pytest.mark.soak
def test_caches_are_made_by_jobs(cluster, target, chats_file):
    settings = ["cache.max_length=384", "cache.batch_tokens=1024", "cache.shard_mib=1", "cache.chats_per_part=12"]
    where = [target, f"chats.path={chats_file}", "output=runs/cache-of-a-job"]
    job = cluster.submit("python", "-m", "pipelines.cache_activations", *where, *settings)
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"^cache: ([\d,]+) of \1 tokens, after [\d:]+$", job.stdout, re.MULTILINE), job.stdout
    assert (cluster.runs / "cache-of-a-job" / "manifest.json").is_file()


@pytest.mark.soak
def test_drafters_are_measured_as_jobs(cluster, target, drafter):
    questions = write_questions(cluster.runs, "one two three", "four five")
    assert questions == cluster.runs / "questions.jsonl"
    job = cluster.submit(
        "python", "-m", "pipelines.evaluate", target, f"drafters=[{drafter}]", "questions=runs/questions.jsonl",
        "trees=[{type: chain, depth: 3}]", "max_new_tokens=8", "output=runs/report",
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    assert (cluster.runs / "report" / "report.html").is_file()


@pytest.mark.soak
def test_sweeps_are_jobs(cluster, drafter):
    write_questions(cluster.runs, "one two three", "four five")
    tree = {"type": "chain", "depth": 3}
    sweep = {
        "distill": ["runs/distill.yaml"],
        "space": {"optim.lr": [0.01]},  # what a sweep decides is tested elsewhere
        "ladder": {"rungs": 1, "reduction": 2},
        "training_tokens": 6 * 512,
        "decoding": {"tree": tree, "questions": "runs/questions.jsonl", "max_new_tokens": 8},
        "confirm": {"finalists": 1, "seeds": 1},
        "output": "runs/sweep",
    }
    (cluster.runs / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    job = cluster.submit("python", "-m", "sweeps.tune", "runs/sweep.yaml")
    assert job.returncode == 0, job.stdout + job.stderr
    assert read_json(cluster.runs / "sweep" / "summary.json")["winner"]["choices"]["optim.lr"] == 0.01
    assert (cluster.runs / "sweep" / "best").is_dir()


def test_the_application_is_deployed_by_a_job_and_answers(cluster, drafter):
    port = free_port()
    serve_file(cluster.runs, port, drafter)
    job = cluster.submit("python", "-m", "serve.deploy", "runs/serve.yaml")
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"running at http://127.0.0.1:{port}" in job.stdout
    assert ask(port)
    status = cluster.run("serve", "status")
    assert "status: RUNNING" in status.stdout
    assert {"Gateway:", "Target:", "Drafter:"} <= set(status.stdout.split())
    end_serve(cluster)


@pytest.mark.soak
def test_the_application_is_deployed_by_ray_s_own_commands(cluster, drafter, tmp_path):
    """A file and the code that the nodes have, another setting, and words in place of a file: one answer."""
    port = free_port()
    environment = {"working_dir": f"local://{REPOSITORY}", "env_vars": {"PYTHONPATH": "platform"}}
    answers = []
    for alone in (False, True):
        args = {"args": {"target": {"model": "runs/target"}}} if alone else {}
        serve_file(tmp_path, port, drafter, runtime_env=environment, **args)
        sent = cluster.run("serve", "deploy", str(tmp_path / "serve.yaml"))
        assert sent.returncode == 0, sent.stdout + sent.stderr
        wait_for(cluster, partial(runs, alone))
        answers.append(ask(port))
    words = ["target.model=runs/target", f"drafters.moa={drafter}", "placement=in_process", "threads=1"]
    options = ["--non-blocking", "--runtime-env", "configs/runtime_env.yaml", "--name=words", "--route-prefix=/words"]
    run = cluster.run("serve", "run", *options, "serve.app:build_app", *words, MORAY_RUNS=str(cluster.runs))
    assert run.returncode == 0, run.stdout + run.stderr
    answers.append(ask(port, "/words"))
    assert len(set(answers)) == 1
    end_serve(cluster)
