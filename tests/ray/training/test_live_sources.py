"""Activations made beside the trainers: the same batches and the same drafter as from a cache, with or without one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replica_killer import ReplicaKiller
from safetensors.torch import load_file
from tiny_caches import CACHE_SETTINGS

from moray.activations.capture.attempts import MAX_ATTEMPTS
from moray.activations.format.manifest import read_layout, read_manifest
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.reading.epochs import by_row_groups, plan_epoch, whole_shards
from moray.batch import TapNeeds
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.training.configs import DistillConfig, LiveSource
from moray.config import validate
from moray.data.ultrachat import ChatsConfig
from moray.errors import ConfigError, DataError
from moray.targets.spec import TargetConfig

NEEDS = TapNeeds(kv_layers=(0, 2), hidden_depths=(-1,))

pytestmark = pytest.mark.usefixtures("ray_session")


def _source(kind: str, chats: Path, **cache: Any) -> LiveSource:
    settings = CACHE_SETTINGS | cache
    return LiveSource(type=kind, chats=ChatsConfig(path=str(chats)), cache=CacheConfig(**settings))


def _updates(
    uri: Path, manifest: Any, targets: Any, epoch: int = 0, is_hybrid: bool = False, window_tokens: int = 4096
) -> list[Any]:
    from moray.cluster.training.stream import Reader, stream_updates

    lengths = whole_shards(manifest.lengths) if is_hybrid else manifest.lengths
    plans = plan_epoch(lengths, 512, 0, epoch, 2, window_tokens)
    if is_hybrid:
        plans = [by_row_groups(plan, manifest.lengths) for plan in plans]
    reader = Reader(str(uri), manifest, NEEDS, targets=targets)
    return [
        [(data_shard.data_shard, data_shard.uids, data_shard.whole("cpu")) for data_shard in data_shards]
        for data_shards in stream_updates(reader, dict(enumerate(plans)))
    ]


def _assert_equal(some: list[Any], others: list[Any]) -> None:
    assert len(some) == len(others) > 5
    for one, other in zip(some, others, strict=True):
        for (data_shard, uids, batch), (other_data_shard, other_uids, other_batch) in zip(one, other, strict=True):
            assert (data_shard, uids) == (other_data_shard, other_uids)
            assert torch.equal(batch.tokens, other_batch.tokens)
            assert torch.equal(batch.response_mask, other_batch.response_mask)
            assert torch.equal(batch.taps.kv, other_batch.taps.kv)
            assert torch.equal(batch.taps.hidden[-1], other_batch.taps.hidden[-1])


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bfloat16", pytest.param("int8", marks=pytest.mark.soak)])
def test_a_stream_hands_over_what_a_cache_does_and_writes_no_shard(
    codec: str, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    from moray.cluster.caching.capture import cache_activations, lay_out_cache
    from moray.cluster.training.live import LiveTargets

    target, source = TargetConfig(model=str(tiny_target)), _source("stream", chats_file, kv_codec=codec)
    cached = cache_activations(str(tmp_path / "cache"), target, source.chats, source.cache, CaptureConfig())
    live = tmp_path / "live"
    lay_out_cache(str(live), target, source.chats, source.cache, CaptureConfig(), is_kept=False)
    layout = read_layout(CacheStore(str(live)))
    assert layout.lengths == cached.lengths
    assert layout.hidden_rms == pytest.approx(cached.hidden_rms, rel=0.1)
    made = _updates(live, layout, LiveTargets(target, source, 1))
    _assert_equal(made, _updates(tmp_path / "cache", cached, None))
    assert not (live / "shards").exists()


@pytest.mark.slow
def test_a_target_over_two_processes_makes_what_one_process_does(
    tiny_target: Path, chats_file: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    from moray.cluster.caching.capture import lay_out_cache
    from moray.cluster.training.live import LiveTargets

    target = TargetConfig(model=str(tiny_target), tensor_parallel=2)
    source, live = _source("stream", chats_file), tmp_path / "live"
    lay_out_cache(str(live), target, source.chats, source.cache, CaptureConfig(), is_kept=False)
    layout, cached = read_layout(CacheStore(str(live))), read_manifest(CacheStore(str(tiny_cache)))
    made, wanted = _updates(live, layout, LiveTargets(target, source, 1)), _updates(tiny_cache, cached, None)
    assert len(made) == len(wanted) > 5
    for one, other in zip(made, wanted, strict=True):
        for (_, uids, batch), (_, wanted_uids, wanted_batch) in zip(one, other, strict=True):
            assert uids == wanted_uids
            torch.testing.assert_close(batch.taps.kv, wanted_batch.taps.kv, atol=2e-2, rtol=2e-2)  # in 16 bits


@pytest.mark.soak
def test_a_window_over_which_replicas_die_ends_the_stream_with_a_reason(
    tiny_target: Path,
    write_chats: Callable[[Path, int], Path],
    tmp_path: Path,
    ray_processes: Callable[[str], dict[int, str]],
    kill: Callable[[int], None],
) -> None:
    from moray.cluster.caching.capture import lay_out_cache
    from moray.cluster.errors import own_errors
    from moray.cluster.training.live import LiveTargets

    target = TargetConfig(model=str(tiny_target))
    source = _source("stream", write_chats(tmp_path / "many.jsonl", 400))
    live = tmp_path / "live"
    lay_out_cache(str(live), target, source.chats, source.cache, CaptureConfig(), is_kept=False)
    layout = read_layout(CacheStore(str(live)))
    attempts, message = (
        live / "attempts" / "*.attempts",
        rf"^{MAX_ATTEMPTS} target replicas died over row group \d+ of shard '000",
    )
    with (
        ReplicaKiller(attempts, MAX_ATTEMPTS, lambda: ray_processes("LiveWindows"), kill) as killer,
        pytest.raises(DataError, match=message),
        own_errors(),
    ):
        _updates(live, layout, LiveTargets(target, source, 1), window_tokens=1 << 20)
    assert len(killer.killed) == MAX_ATTEMPTS


@pytest.mark.soak
def test_a_hybrid_source_writes_what_is_missing_and_reads_what_is_there(
    tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    from moray.cluster.caching.capture import cache_activations, lay_out_cache
    from moray.cluster.training.live import LiveTargets

    target, source = TargetConfig(model=str(tiny_target)), _source("hybrid", chats_file)
    cached = cache_activations(str(tmp_path / "cache"), target, source.chats, source.cache, CaptureConfig())
    live = tmp_path / "live"
    lay_out_cache(str(live), target, source.chats, source.cache, CaptureConfig(), is_kept=True)
    layout = read_layout(CacheStore(str(live)))
    targets = LiveTargets(target, source, 1)
    first = _updates(live, layout, targets, is_hybrid=True)
    _assert_equal(first, _updates(tmp_path / "cache", cached, None, is_hybrid=True))
    written = {path.name: path.stat().st_mtime_ns for path in (live / "shards").iterdir()}
    assert {name.removesuffix(".parquet") for name in written if name.endswith(".parquet")} == set(cached.shards)
    _assert_equal(_updates(live, layout, targets, 1), _updates(tmp_path / "cache", cached, None, 1))
    assert {path.name: path.stat().st_mtime_ns for path in (live / "shards").iterdir()} == written
    # What was written is a cache: the caching command finds nothing to do but to close it.
    completed = cache_activations(str(live), target, source.chats, source.cache, CaptureConfig())
    assert completed.shards == cached.shards


def _config(target: Path, chats: Path, folder: Path, source: dict[str, Any] | None = None) -> DistillConfig:
    block = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}
    values: dict[str, Any] = {
        "target": {"model": str(target)},
        "activations": str(folder / "activations"),
        "output": str(folder / "drafter"),
        "drafter": {
            "type": "moa",
            "target_layers": 1,
            "layer_self_attention": block,
            "self_attention": block,
            "cross_attention": block,
        },
        "optim": {"type": "muon", "lr": 0.02, "vector_lr": 0.003},
        "schedule": {"type": "linear", "warmup_steps": 3},
        "train": {"epochs": 2, "batch_tokens": 1024, "save_steps": 100, "logging_steps": 2},
    }
    if source is not None:
        values["source"] = {"chats": {"path": str(chats)}, "cache": CACHE_SETTINGS, **source}
    return validate(DistillConfig, values)


@pytest.mark.soak
def test_a_hybrid_run_trains_and_leaves_a_complete_cache(tiny_target: Path, chats_file: Path, tmp_path: Path) -> None:
    from moray.cluster.training.distill import distill
    from moray.distill.tracking.metrics import read_metrics

    config = _config(tiny_target, chats_file, tmp_path, {"type": "hybrid"})
    folder = distill(config)
    manifest = read_manifest(CacheStore(config.activations))
    assert manifest.num_tokens == sum(json.loads(path.read_text())["tokens"] for path in _markers(config))
    rows = read_metrics(folder)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert load_file(folder / "drafter.safetensors")


def _markers(config: DistillConfig) -> list[Path]:
    return sorted((Path(config.activations) / "shards").glob("*.json"))


@pytest.mark.soak
def test_streaming_trains_the_drafter_that_a_cache_does(tiny_target: Path, chats_file: Path, tmp_path: Path) -> None:
    from moray.cluster.caching.capture import cache_activations, lay_out_cache
    from moray.cluster.training.distill import distill

    streaming = _config(tiny_target, chats_file, tmp_path / "stream", {"type": "stream"})
    reading = _config(tiny_target, chats_file, tmp_path / "disk")
    settings = CacheConfig(**CACHE_SETTINGS)
    chats = ChatsConfig(path=str(chats_file))
    cached = cache_activations(reading.activations, reading.target, chats, settings, CaptureConfig())
    lay_out_cache(streaming.activations, streaming.target, chats, settings, CaptureConfig(), is_kept=False)
    _give_rms(streaming.activations, cached.hidden_rms)
    some, others = (load_file(distill(config) / "drafter.safetensors") for config in (streaming, reading))
    assert not _markers(streaming)
    for name, tensor in others.items():
        torch.testing.assert_close(some[name], tensor, rtol=0.0, atol=1e-6, msg=name)


def _give_rms(uri: str, hidden_rms: dict[int, float]) -> None:
    """A layout knows the scale of features from a sample, a finished cache from all of it: here both know the same."""
    store = CacheStore(uri)
    layout = store.read_json("layout.json")
    store.write_json("layout.json", layout | {"hidden_rms": {f"hidden.{d}": rms for d, rms in hidden_rms.items()}})


def test_every_worker_needs_a_target_of_its_own(tiny_target: Path, chats_file: Path, tmp_path: Path) -> None:
    config = _config(tiny_target, chats_file, tmp_path, {"type": "stream"})
    values = config.model_dump(mode="json") | {"workers": {"num_workers": 2}}
    with pytest.raises(ConfigError, match=r"num_targets is 1, but every one of 2 workers needs a target of its own"):
        validate(DistillConfig, values)
