"""How a training worker gets its windows of the cache."""

import threading
from pathlib import Path

import pytest
from read_back import stream_batches

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.activations.reading.epochs import plan_epoch
from moray.batch import TapNeeds

pytestmark = pytest.mark.usefixtures("ray_session")


def test_reading_ahead_starts_no_thread_in_the_trainer(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data's executor would be one: it polls, and takes the GIL from the training step (docs/notebook.md)."""
    manifest = read_manifest(CacheStore(str(tiny_cache)))
    plan = plan_epoch(manifest.lengths, 384, 0, 0, 1, window_tokens=1024)[0]
    assert len(plan.windows) > 3
    started: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    batches = list(stream_batches(str(tiny_cache), manifest, plan, TapNeeds((0,), (-1,))))
    assert len(batches) == plan.num_steps
    assert started == []
