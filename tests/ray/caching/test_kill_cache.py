"""kill -9 while caching, at many instants: the same command goes on and every chat is in exactly one shard."""

import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

NUM_KILLS = 6
NUM_CHATS = 240
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


class _Instant:
    """A moment of a run: at most a tenth of a second, at random, after something has come about."""

    def __init__(self, condition: Callable[[], bool], seconds: float) -> None:
        self._condition, self._seconds = condition, seconds
        self._since: float | None = None

    def __call__(self) -> bool:
        if self._since is None and self._condition():
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() >= self._since + self._seconds


def _instants(folder: Path) -> Iterator[Callable[[], bool]]:
    """When to kill the run that begins next: first while it tokenises, then behind the last part, then while it writes
    shards; counted by the run's own progress, or half of the kills would fall into Ray's start."""
    rng = random.Random(7)

    def after(num_parts: int, num_shards: int = 0) -> Callable[[], bool]:
        def is_there() -> bool:
            parts, shards = _files(folder)
            return parts >= num_parts and shards >= num_shards

        return _Instant(is_there, rng.random() * 0.1)

    yield _Instant(lambda: _files(folder)[0] >= 1, 0.0)
    yield after(_files(folder)[0] + rng.randint(1, 10))
    yield _Instant(lambda: _files(folder)[0] >= NUM_PARTS // 2, 0.0)
    yield after(NUM_PARTS)
    yield _Instant(lambda: any((folder / "shards").glob("*.tmp")), 0.0)
    while True:
        yield after(NUM_PARTS, _files(folder)[1] + rng.randint(1, 3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_and_again_it_goes_on_and_loses_and_repeats_nothing(
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
    stages = {"tokenise": 0, "between": 0, "shards": 0}
    kept: dict[str, int] = {}
    for number, instant in enumerate(islice(_instants(broken), NUM_KILLS)):
        before = _files(broken)
        start_pipeline("cache_activations", *arguments).kill_when(instant)
        found, committed = _files(broken), _committed(broken)
        stages["tokenise" if found[0] < NUM_PARTS else "shards" if found[1] else "between"] += 1
        assert found >= before
        assert not (broken / "manifest.json").exists(), f"it was complete before kill {number}"
        assert {name: committed.get(name) for name in kept} == kept, f"rewritten before kill {number}"
        kept = committed
    assert all(stages.values()), stages
    assert stages["tokenise"] >= NUM_KILLS // 3, stages

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
