"""The benchmarks of caching and training on the tiny target: every figure is there, and adds up."""

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from moray.activations.format.manifest import read_manifest
from moray.activations.format.schema import bytes_per_token
from moray.activations.format.store import CacheStore
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig
from pipelines.benchmarks.cluster_configs import CacheBenchmarkConfig, TrainBenchmarkConfig

BLOCK = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}


@pytest.mark.soak
def test_caching_is_measured_stage_by_stage(tiny_target: Path, chats_file: Path, tmp_path: Path) -> None:
    from tiny_caches import CACHE_SETTINGS

    from moray.activations.format.schema import CacheConfig
    from pipelines.benchmarks.cache import benchmark_cache, print_cache_benchmark

    config = CacheBenchmarkConfig(
        target=TargetConfig(model=str(tiny_target)),
        chats=ChatsConfig(path=str(chats_file)),
        cache=CacheConfig(**CACHE_SETTINGS),
        codecs=(("int4", "int8"),),
        folder=str(tmp_path),
    )
    result = json.loads(json.dumps(benchmark_cache(config, Console(quiet=True))))
    stages = {stage["stage"]: stage for stage in result["stages"]}
    assert list(stages) == ["tokenise", "capture", "read"]
    assert stages["capture"]["tokens"] == stages["read"]["tokens"] == stages["tokenise"]["tokens"]
    assert all(stage["tokens_per_second"] > 0 and stage["peak_memory_bytes"] > 1 << 26 for stage in stages.values())
    assert result["bytes_per_token"] == stages["capture"]["bytes_per_token"]
    assert 0 <= result["padding_waste"] < 0.5
    assert not list(tmp_path.iterdir())
    print_cache_benchmark(result, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.soak
def test_training_is_measured_in_three_ways(
    tiny_cache: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.benchmarks import train as train_benchmark
    from pipelines.benchmarks.train import benchmark_training, print_train_benchmark

    monkeypatch.setattr(train_benchmark, "_MACHINE_TURNS", 1)
    run = tmp_path / "moa.yaml"
    drafter = {"type": "moa", "target_layers": 0, "layer_self_attention": BLOCK}
    drafter |= {"self_attention": BLOCK, "cross_attention": BLOCK}
    settings = {"drafter": drafter, "activations": str(tiny_cache), "output": str(tmp_path / "run")}
    settings |= {"optim": {"type": "adamw", "lr": 1e-3}, "train": {"batch_tokens": 512}}
    run.write_text(yaml.safe_dump(settings))
    config = TrainBenchmarkConfig(
        target=TargetConfig(model=str(tiny_target)), runs=(str(run),), updates=2, rounds=1, peak_flops=1e12
    )
    result = json.loads(json.dumps(benchmark_training(config, Console(quiet=True))))
    (row,) = result["rows"]
    speeds = row["tokens_per_second_by_way"]
    assert result["tokens_per_second"] == speeds["cached"] > 0
    assert result["cached_vs_online"] == pytest.approx(speeds["cached"] / speeds["online"])
    assert result["speedup_vs_recipe_per_worker"] == pytest.approx(speeds["cached"] / speeds["recipe"])
    assert result["speedup_vs_recipe"] == pytest.approx(row["whole_machine"]["cached"] / row["whole_machine"]["recipe"])
    columns = {name: read_manifest(CacheStore(str(tiny_cache))).columns[name] for name in ("kv.00", "hidden.-1")}
    assert result["bytes_per_token"] > bytes_per_token(columns)
    assert row["flops_per_token"] > 6 * 64 * 3 * 64
    assert row["mfu"] == pytest.approx(row["flops_per_token"] * speeds["cached"] / 1e12)
    assert row["peak_memory_bytes"].keys() == {"cached", "online", "recipe"}
    print_train_benchmark(result, Console(quiet=True))


def test_ratios_are_taken_round_by_round() -> None:
    """A round in which all was slow changes nothing."""
    from pipelines.benchmarks.ways_to_train import median_ratio

    assert median_ratio([2.0, 40.0, 6.6], [1.0, 20.0, 3.0]) == 2.0
