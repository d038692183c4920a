"""kill -9 while columns are being added: the same command goes on, nothing is redone, and the cache stays readable."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from replica_killer import ReplicaKiller

from moray.activations.capture.attempts import MAX_ATTEMPTS
from moray.activations.format.manifest import read_manifest
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.config import load_config
from moray.data.ultrachat import ChatsConfig
from moray.errors import DataError
from moray.targets.spec import TargetConfig
from pipelines import cache_activations

NUM_CHATS = 120
CHATS_PER_PART = 6
MORE = ["cache.hidden_depths=[-1,-2,-4]", "cache.kv_layers=null"]
OLD = ["kv.02", "hidden.-1", "hidden.-2"]


def _arguments(folder: Path, target: Path, chats: Path, output: Path) -> list[str]:
    cache = {"max_length": 384, "batch_tokens": 384, "shard_mib": 1, "chats_per_part": CHATS_PER_PART}
    config = {
        "target": {"model": str(target)},
        "chats": {"path": str(chats)},
        "cache": cache | {"hidden_depths": [-1, -2], "kv_layers": [2]},
        "output": str(output),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(path)]


def _shards(output: Path) -> dict[str, tuple[int, str]]:
    """Time of writing and hash of every file of a shard."""
    files = [*(output / "shards").glob("*.json"), *(output / "shards").glob("*.parquet")]
    return {path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def _done(output: Path, old: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """The shards whose new file and new marker are both there."""
    changed = {name: state for name, state in _shards(output).items() if old[name] != state}
    return {
        name: state
        for name, state in changed.items()
        if {f"{Path(name).stem}.{k}" for k in ("json", "parquet")} <= changed.keys()
    }


def _rows(output: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    names = sorted(read_manifest(CacheStore(str(output))).shards)
    return [
        row for n in names for row in pq.read_table(output / "shards" / f"{n}.parquet", columns=columns).to_pylist()
    ]


def _times(output: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (output / "shards").glob("*.json")}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_while_adding_columns_it_goes_on_and_repeats_nothing(
    ray_session: None,
    tiny_target: Path,
    tmp_path: Path,
    start_pipeline: Callable[..., Any],
    write_chats: Callable[[Path, int], Path],
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", NUM_CHATS)
    output, whole = tmp_path / "cache", tmp_path / "whole"
    arguments = _arguments(tmp_path, tiny_target, chats, output)
    for words in (arguments, [*arguments, f"output={whole}", *MORE]):
        config = load_config(cache_activations.CONFIG, words)
        cache_activations.main(config)
    old, old_rows = _shards(output), _rows(output)
    old_times = _times(output)
    num_shards = len(old_times)
    assert num_shards >= NUM_CHATS // CHATS_PER_PART

    def half_way() -> bool:
        written = sum(_times(output)[name] != time for name, time in old_times.items())
        return written >= 7 and (bool(list((output / "shards").glob("*.parquet.*.tmp"))) or written >= 13)

    start_pipeline("cache_activations", *arguments, *MORE).kill_when(half_way)
    kept = _done(output, old)
    assert (output / "adding.json").exists()
    assert _rows(output, list(old_rows[0])) == old_rows, "not the old cache after the kill"
    assert 2 * 7 <= len(kept) < 2 * num_shards

    last = start_pipeline("cache_activations", *arguments, *MORE)
    assert last.finish() == 0, last.output
    assert f" of {num_shards} shards" in last.output
    final = _shards(output)
    assert final.keys() == old.keys()
    assert {name: final[name] for name in kept} == kept
    assert not [path for suffix in ("tmp", "next", "attempts") for path in output.rglob(f"*.{suffix}")]
    assert not (output / "adding.json").exists()
    assert _rows(output, list(old_rows[0])) == old_rows
    by_chat = [{row["uid"]: row for row in _rows(folder)} for folder in (output, whole)]
    assert by_chat[0] == by_chat[1]
    assert len(by_chat[0]) == NUM_CHATS
    assert yaml.safe_load((output / "run.yaml").read_text())["config"]["cache"]["hidden_depths"] == [-1, -2, -4]


@pytest.mark.soak
def test_a_shard_over_which_replicas_die_is_named_and_the_same_command_goes_on(
    ray_session: None,
    tiny_target: Path,
    write_chats: Callable[[Path, int], Path],
    tmp_path: Path,
    ray_processes: Callable[[str], dict[int, str]],
    kill: Callable[[int], None],
) -> None:
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig

    chats = write_chats(tmp_path / "many.jsonl", 400)
    output = tmp_path / "cache"

    def cache(*depths: int) -> Any:
        settings = {"chats_per_part": 200, "batch_tokens": 384, "shard_mib": 64, "max_length": 384}
        config = CacheConfig(hidden_depths=depths, kv_layers=(), **settings)
        target = TargetConfig(model=str(tiny_target))
        return cache_activations(str(output), target, ChatsConfig(path=str(chats)), config, CaptureConfig())

    cache(-1)
    attempts = output / "shards" / "00001-00000.attempts"
    with (
        ReplicaKiller(attempts, MAX_ATTEMPTS, lambda: ray_processes("_ExtendActor"), kill) as killer,
        pytest.raises(
            DataError, match=rf"{MAX_ATTEMPTS} target replicas died over shard '00001-00000' of .*num_targets"
        ),
    ):
        cache(-1, -2)
    assert len(killer.killed) == MAX_ATTEMPTS
    assert list(read_manifest(CacheStore(str(output))).columns) == ["hidden.-1"]
    assert list(cache(-1, -2).columns) == ["hidden.-1", "hidden.-2"]
    assert not list(output.rglob("*.attempts"))
