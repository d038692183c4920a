"""kill -9 while caching, at several instants: the same command goes on and every chat is in exactly one shard."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

NUM_CHATS = 120
CHATS_PER_PART = 6


def _arguments(folder: Path, target: Path, chats: Path, output: Path) -> list[str]:
    config = {
        "target": {"model": str(target)},
        "chats": {"path": str(chats)},
        "cache": {"max_length": 384, "batch_tokens": 384, "shard_mib": 1, "chats_per_part": CHATS_PER_PART},
        "output": str(output),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(path)]


def _committed(output: Path) -> dict[str, int]:
    """Time of writing of every file of a committed shard."""
    files = [path for marker in (output / "shards").glob("*.json") for path in (marker, marker.with_suffix(".parquet"))]
    return {path.name: path.stat().st_mtime_ns for path in files}


def _rows(output: Path) -> list[dict[str, Any]]:
    names = sorted(path.stem for path in (output / "shards").glob("*.json"))
    return [row for name in names for row in pq.read_table(output / "shards" / f"{name}.parquet").to_pylist()]


def _count(folder: Path, number: int) -> Callable[[], bool]:
    return lambda: len(list(folder.glob("*.json"))) >= number


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_caching_goes_on_and_loses_and_repeats_nothing(
    tiny_target: Path, tmp_path: Path, start_pipeline: Callable[..., Any], write_chats: Callable[[Path, int], Path]
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", NUM_CHATS)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    # Undisturbed and as a user runs it: the tests' own setting for authentication is left out.
    arguments = _arguments(tmp_path, tiny_target, chats, unbroken)
    whole = start_pipeline("cache_activations", *arguments, RAY_AUTH_MODE="token", HOME=str(tmp_path))
    assert whole.finish() == 0, whole.output
    # Bars and the two lines of figures: nothing of Ray's.
    assert "core_worker" not in whole.output
    assert "ray" not in whole.output.replace(str(tmp_path), "").lower()

    arguments = _arguments(tmp_path, tiny_target, chats, broken)
    instants = {
        "the first part is there": _count(broken / "tokens", 1),
        "half the parts are there": _count(broken / "tokens", NUM_CHATS // CHATS_PER_PART // 2),
        "a shard is being written": lambda: bool(list((broken / "shards").glob("*.tmp"))),
        "three shards are committed": _count(broken / "shards", 3),
        "eleven shards are committed": _count(broken / "shards", 11),
    }
    kept: dict[str, int] = {}
    killed: list[Any] = []
    for instant, ready in instants.items():
        killed.append(start_pipeline("cache_activations", *arguments))
        killed[-1].kill_when(ready)
        committed = _committed(broken)
        assert not (broken / "manifest.json").exists(), f"it was complete before the kill when {instant}"
        assert {name: committed.get(name) for name in kept} == kept, f"rewritten before the kill when {instant}"
        kept = committed
    assert 22 <= len(kept) < 2 * NUM_CHATS // CHATS_PER_PART

    last = start_pipeline("cache_activations", *arguments)
    assert last.finish() == 0, last.output
    final = _committed(broken)
    assert {name: final[name] for name in kept} == kept
    assert not list(broken.rglob("*.tmp"))

    rows = _rows(broken)
    uids = [row["uid"] for row in rows]
    wanted = [f"chats.jsonl#{number}#chat-{number - 1}" for number in range(1, NUM_CHATS + 1)]
    assert sorted(uids) == sorted(wanted)
    assert rows == _rows(unbroken)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (broken, unbroken)]
    assert manifests[0] == manifests[1]
    for run in killed:
        run.wait_until_gone(180)
