"""kill -9 while caching, at several instants: the same command goes on and every chat is in exactly one shard."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

NUM_CHATS = 120
CHATS_PER_PART = 6


def _arguments(
    folder: Path, target: Path, chats: Path, output: Path, chats_per_part: int = CHATS_PER_PART
) -> list[str]:
    config = {
        "target": {"model": str(target)},
        "chats": {"path": str(chats)},
        "cache": {"max_length": 384, "batch_tokens": 384, "shard_mib": 1, "chats_per_part": chats_per_part},
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


NUM_KILLS = 20
MANY_CHATS = 360
TINY_PARTS = 3
"""Chats in each of 120 parts, hence 120 shards: progress is slow enough for every kill to find work under way."""


def _files(folder: Path) -> tuple[int, int]:
    return len(list((folder / "tokens").glob("*.json"))), len(list((folder / "shards").glob("*.json")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_at_random_instants_lose_and_repeat_nothing(
    tiny_target: Path, tmp_path: Path, start_pipeline: Callable[..., Any], write_chats: Callable[[Path, int], Path]
) -> None:
    """Each kill comes a random moment after a random amount of this run's own progress, or half of them would
    fall into Ray's start: first while it tokenises, then once behind the last part, then while it writes shards."""
    rng = random.Random(7)
    chats = write_chats(tmp_path / "chats.jsonl", MANY_CHATS)
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    arguments = _arguments(tmp_path, tiny_target, chats, broken, TINY_PARTS)
    num_parts = MANY_CHATS // TINY_PARTS
    stages = {"tokenise": 0, "between": 0, "shards": 0}
    killed: list[Any] = []
    for number in range(NUM_KILLS):
        parts, shards = _files(broken)
        run = start_pipeline("cache_activations", *arguments)
        killed.append(run)
        wait_for_parts = parts < num_parts
        step = rng.randint(1, 10 if wait_for_parts else 3)
        wanted = min(num_parts, parts + step) if wait_for_parts else shards + step
        if wait_for_parts and number < NUM_KILLS // 4:
            run.wait_until(lambda wanted=wanted: _files(broken)[0] >= wanted)
        elif wait_for_parts:  # through to the moment after the last part, before the first shard
            run.wait_until(lambda: _files(broken)[0] >= num_parts)
        else:
            run.wait_until(lambda wanted=wanted: _files(broken)[1] >= wanted)
        instant = time.monotonic() + rng.random() * 0.1
        run.kill_when(lambda instant=instant: time.monotonic() >= instant)
        found = _files(broken)
        stages["tokenise" if found[0] < num_parts else "shards" if found[1] else "between"] += 1
        assert found >= (parts, shards)
        assert not (broken / "manifest.json").exists()
    assert all(stages.values()), stages
    assert stages["tokenise"] >= NUM_KILLS // 5, stages
    assert stages["shards"] >= NUM_KILLS // 3, stages
    last = start_pipeline("cache_activations", *arguments)
    assert last.finish() == 0, last.output
    whole = start_pipeline("cache_activations", *_arguments(tmp_path, tiny_target, chats, unbroken, TINY_PARTS))
    assert whole.finish() == 0, whole.output
    assert not list(broken.rglob("*.tmp"))
    rows = _rows(broken)
    assert len({row["uid"] for row in rows}) == len(rows) == MANY_CHATS
    assert rows == _rows(unbroken)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (broken, unbroken)]
    assert manifests[0] == manifests[1]
    for run in killed:
        run.wait_until_gone(180)
