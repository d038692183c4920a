"""kill -9 while caching: the same command goes on and every chat is in exactly one shard."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

NUM_CHATS = 84
CHATS_PER_PART = 3
NUM_PARTS = NUM_CHATS // CHATS_PER_PART
"""And shards: progress is slow enough for every kill to find work under way."""


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


def _files(folder: Path) -> tuple[int, int]:
    """Parts that are tokenised, and shards that are committed."""
    return len(list((folder / "tokens").glob("*.json"))), len(list((folder / "shards").glob("*.json")))


TOKENISING, WRITING = "a tenth of the parts is tokenised", "a shard is being written"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "instants", [(WRITING,), pytest.param((TOKENISING, WRITING), marks=pytest.mark.soak)], ids=["once", "twice"]
)
def test_killed_it_goes_on_and_loses_and_repeats_nothing(
    instants: tuple[str, ...],
    tiny_target: Path,
    tmp_path: Path,
    start_pipeline: Callable[..., Any],
    write_chats: Callable[[Path, int], Path],
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", NUM_CHATS)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    # Undisturbed and as a user runs it: the tests' own setting for authentication is left out.
    arguments = _arguments(tmp_path, tiny_target, chats, unbroken)
    whole = start_pipeline("cache_activations", *arguments, RAY_AUTH_MODE="token", HOME=str(tmp_path))
    assert whole.finish() == 0, whole.output
    # Bars and the two lines of figures: nothing of Ray's. Our own line says that it starts, where that takes long.
    said = [line for line in whole.output.splitlines() if not line.startswith("start Ray: ")]
    assert "core_worker" not in whole.output
    assert "ray" not in "\n".join(said).replace(str(tmp_path), "").lower()

    arguments = _arguments(tmp_path, tiny_target, chats, broken)
    # By the run's own progress, or kills would fall into Ray's start.
    ready: dict[str, Callable[[], bool]] = {
        TOKENISING: lambda: _files(broken)[0] >= NUM_PARTS // 10,
        WRITING: lambda: _files(broken)[1] >= 3 and any((broken / "shards").glob("*.tmp")),
    }
    kept: dict[str, int] = {}
    for instant in instants:
        before = _files(broken)
        start_pipeline("cache_activations", *arguments).kill_when(ready[instant])
        found, committed = _files(broken), _committed(broken)
        assert found >= before
        assert (found[0] < NUM_PARTS) == (instant == TOKENISING), f"not when {instant}: {found}"
        assert not (broken / "manifest.json").exists(), f"it was complete before the kill when {instant}"
        assert {name: committed.get(name) for name in kept} == kept, f"rewritten before the kill when {instant}"
        kept = committed
    assert len(kept) >= 2 * 3  # of a shard, its file and its marker

    last = start_pipeline("cache_activations", *arguments)
    assert last.finish() == 0, last.output
    final = _committed(broken)
    assert {name: final[name] for name in kept} == kept
    assert not list(broken.rglob("*.tmp"))
    rows = _rows(broken)
    wanted = [f"chats.jsonl#{number}#chat-{number - 1}" for number in range(1, NUM_CHATS + 1)]
    assert sorted(row["uid"] for row in rows) == sorted(wanted)
    assert rows == _rows(unbroken)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (broken, unbroken)]
    assert manifests[0] == manifests[1]
