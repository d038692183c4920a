"""kill -9 while the target answers chats, half-way: the same command goes on and the texts are the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

NUM_CHATS = 60
CHATS_PER_PART = 5


def _arguments(folder: Path, target: Path, chats: Path, output: Path, **changes: Any) -> list[str]:
    config = {
        "target": {"model": str(target)},
        "chats": {"path": str(chats), "max_bad_rows": 1},
        "sampling": {"temperature": 0.8, "seed": 1},
        "max_new_tokens": 100,
        "max_length": 500,
        "batch_tokens": 512,
        "chats_per_part": CHATS_PER_PART,
        "output": str(output),
    }
    path = folder / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return [str(path)]


def _files(output: Path) -> dict[str, bytes]:
    """Everything but the record of who ran what where."""
    return {path.name: path.read_bytes() for path in output.iterdir() if path.name != "run.yaml"}


def _written(output: Path) -> dict[str, int]:
    """When the files of every finished part were written."""
    files = [path for marker in output.glob("part-*.yaml") for path in (marker, marker.with_suffix(".jsonl"))]
    return {path.name: path.stat().st_mtime_ns for path in files}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_answering_goes_on_and_the_texts_are_the_same(
    tiny_target: Path, tmp_path: Path, start_pipeline: Callable[..., Any], write_chats: Callable[[Path, int], Path]
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", NUM_CHATS)
    lines = chats.read_text(encoding="utf-8").splitlines()
    chats.write_text("\n".join([lines[0], "damaged", *lines[1:]]) + "\n", encoding="utf-8")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = start_pipeline("regenerate", *_arguments(tmp_path, tiny_target, chats, unbroken))
    assert whole.finish() == 0, whole.output
    assert "bad row: " in whole.output
    assert "Warning" not in whole.output

    def half_way() -> bool:
        return len(_written(broken)) >= 8 and (bool(list(broken.glob("part-*.tmp"))) or len(_written(broken)) >= 14)

    # Neither the size of a batch nor the number of replicas may change a text.
    changes = {"batch_tokens": 1024, "num_targets": 2}
    killed = start_pipeline("regenerate", *_arguments(tmp_path, tiny_target, chats, broken, **changes))
    killed.kill_when(half_way)
    kept = _written(broken)
    assert not (broken / "summary.yaml").exists(), "it was complete before the kill"
    assert 8 <= len(kept) < 2 * NUM_CHATS // CHATS_PER_PART

    last = start_pipeline("regenerate", *_arguments(tmp_path, tiny_target, chats, broken))
    assert last.finish() == 0, last.output
    assert {name: _written(broken)[name] for name in kept} == kept
    totals = [yaml.safe_load((folder / "summary.yaml").read_text()) for folder in (broken, unbroken)]
    assert totals[0]["chats"] == NUM_CHATS
    assert totals[0]["bad"] == 1
    assert _files(broken) == _files(unbroken)
    killed.wait_until_gone(180)
