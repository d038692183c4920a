"""What serve.benchmark is told, what it deploys, and that an application of synthetic costs says so."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from moray.config import load_config, validate
from moray.errors import ConfigError
from serve.api.documents import Model
from serve.api.routes import _model
from serve.bench import applications, side_by_side
from serve.bench.configs import PoolConfig, ScalingBenchmarkConfig, SideBySideConfig
from serve.bench.side_by_side import benchmark_side_by_side
from serve.benchmark import main_side_by_side
from serve.config import ServeConfig, read_args
from serve.target import TargetDescription

BENCHMARKS = Path(__file__).resolve().parents[3] / "configs" / "benchmarks"
APPLICATION = {"target": {"model": "t"}, "drafters": {"moa": "m"}}
SCALING = {
    "application": APPLICATION,
    "questions": "q",
    "num_requests": 32,
    "pools": [{"targets": 1, "drafters": 1}],
    "regimes": {"slow": {"draft": {"ms": 5}}},
}
SIDE_BY_SIDE = {
    "application": APPLICATION,
    "questions": "q",
    "applications": {"pool": {}, "inside": {"placement": "in_process"}},
    "ways": {"a": {"application": "pool"}, "b": {"application": "inside"}},
    "pairs": [["a", "b"]],
    "levels": [{"max_concurrency": 1}],
}


@pytest.mark.parametrize("name", ["placement-demo", "placement-cores-demo", "groups-demo"])
def test_presets_compare_applications_that_differ(name):
    config = load_config(SideBySideConfig, [str(BENCHMARKS / f"{name}.yaml")])
    args = [config.args_with(changes) for changes in config.applications.values()]
    assert len({str(own) for own in args}) == len(args)
    assert {way.application for way in config.ways.values()} == set(config.applications)
    load = config.requests_to_all({way: f"http://127.0.0.1:1/{way[0]}" for way in config.ways})
    assert (load.levels, list(load.variants), load.rounds) == (config.levels, list(config.ways), config.rounds)
    assert load.ignore_eos


def test_the_scaling_preset_scales_each_pool_alone_and_both():
    config = load_config(ScalingBenchmarkConfig, [str(BENCHMARKS / "scaling-demo.yaml")])
    assert {(pool.targets, pool.drafters) for pool in config.pools} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    for costs in config.regimes.values():
        args = config.args_with({"engine": {"synthetic": costs.model_dump()}})
        assert read_args(args).engine.synthetic == costs
        assert read_args(args).engine.num_micro_batches == config.application.engine.num_micro_batches


@pytest.mark.parametrize(
    ("config_class", "values", "changes", "message"),
    [
        (ScalingBenchmarkConfig, SCALING, {"num_requests": 31}, "num_requests is 31; 32"),
        (ScalingBenchmarkConfig, SCALING, {"application": {"target": {"model": "t"}}}, "placement must be pool"),
        (
            ScalingBenchmarkConfig,
            SCALING,
            {"application": {"target": {"model": "t"}, "drafters": {"a": {"type": "ngram"}, "b": "x"}}},
            "the first drafter have weights",
        ),
        (SideBySideConfig, SIDE_BY_SIDE, {"applications": {"a b": {}}}, "applications holds 'a b'"),
        (SideBySideConfig, SIDE_BY_SIDE, {"applications": {"pool": {"treads": 1}}}, "unknown key 'treads'"),
        (SideBySideConfig, SIDE_BY_SIDE, {"ways": {"a": {"application": "x"}}}, "ways.a.application is 'x'"),
        (SideBySideConfig, SIDE_BY_SIDE, {"pairs": [["a", "c"]]}, "pairs names 'c'; the ways are a, b"),
    ],
)
def test_what_cannot_be_measured_is_refused(config_class, values, changes, message):
    validate(config_class, values)
    with pytest.raises(ConfigError, match=message):
        validate(config_class, values | changes)


def test_a_core_that_is_not_there_is_named_before_anything_starts():
    ways = {"a": {"application": "pool", "cores": {"Target": [10_000]}}, "b": {"application": "inside"}}
    config = validate(SideBySideConfig, SIDE_BY_SIDE | {"ways": ways})
    with pytest.raises(ConfigError, match=r"ways\.a\.cores\.Target is 10000; the cores here are \d"):
        benchmark_side_by_side(config, Console(quiet=True))


@pytest.mark.parametrize(("name", "ray"), [("ray.address", {"address": "10.0.0.1:6379"}), ("RAY_ADDRESS", {})])
def test_no_cluster_is_joined_whose_applications_would_end(monkeypatch, name, ray):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests of this process may have a session
    config = validate(SideBySideConfig, SIDE_BY_SIDE | {"ray": ray})
    with pytest.raises(ConfigError, match=f"{name} is '10.0.0.1:6379', but this benchmark deploys on a Ray of its own"):
        benchmark_side_by_side(config, Console(quiet=True))


def test_what_was_measured_before_an_interrupt_is_printed_and_written(monkeypatch, tmp_path, capsys):
    notes = ["interrupted: 0 of 1 levels were measured"]
    result = {"levels": [], "synthetic": [], "interrupted": True, "notes": notes}
    monkeypatch.setattr(side_by_side, "benchmark_side_by_side", lambda config, console: result)
    report = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        main_side_by_side(validate(SideBySideConfig, SIDE_BY_SIDE | {"report": str(report)}))
    assert json.loads(report.read_text()) == result
    assert f"note: {notes[0]}" in capsys.readouterr().out
    result["interrupted"] = False
    main_side_by_side(validate(SideBySideConfig, SIDE_BY_SIDE))


def test_only_deployments_that_exist_are_scaled():
    pool = PoolConfig(targets=2, drafters=3)
    counts = [{d["name"]: d["num_replicas"] for d in applications._deployments(args, pool)} for args in (
        APPLICATION, APPLICATION | {"placement": "in_process"},
    )]  # fmt: skip
    assert counts == [{"Gateway": 1, "Target": 2, "Drafter": 3}, {"Gateway": 1, "Target": 2}]
    assert pool.name == "2 targets, 3 drafters"


def test_every_thread_is_put_on_its_cores_and_set_free_again():
    config = validate(SideBySideConfig, SIDE_BY_SIDE)
    before = os.sched_getaffinity(0)
    one = min(before)
    process = applications.Applications(config.wait_seconds)
    try:
        process.pin("pool", {"others": (one,)})
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        assert all(os.sched_getaffinity(thread) == {one} for thread in threads)
    finally:
        process.pin("", {})
    assert os.sched_getaffinity(0) == before
    assert applications._part(["ray::ServeReplica:pool:Drafter.handle"], "pool") == "Drafter"
    assert applications._part(["ray::ServeReplica:pool:Drafter"], "other") == "others"


def test_a_model_says_that_its_speed_is_made_up():
    def shown(engine: dict[str, Any]) -> dict[str, Any]:
        async def describe() -> TargetDescription:
            return TargetDescription(64, 100, ("moa",), num_open=0, num_running=0, num_leases=0)

        config = validate(ServeConfig, APPLICATION | {"engine": engine})
        gateway: Any = SimpleNamespace(config=config, describe=describe)
        found = asyncio.run(_model(gateway))
        assert TypeAdapter(Model).validate_python(found)
        return found

    assert "synthetic_costs" not in shown({})
    assert shown({"synthetic": {"draft": {"ms": 5}}})["synthetic_costs"].startswith("SYNTHETIC COSTS ARE ON")
