"""A cache made by a target over two processes is that of one process, also if a follower is killed on the way."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny_caches import CACHE_SETTINGS

from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import read_manifest
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.data.ultrachat import ChatsConfig
from moray.targets.spec import TargetConfig

pytestmark = pytest.mark.usefixtures("ray_session")
RUN_MARK = "MORAY_TEST_RUN"


def _followers() -> list[psutil.Process]:
    """Of this session's targets."""
    name, mark = "moray.targets.parallel.follower", os.environ[RUN_MARK]
    named = [one for one in psutil.process_iter(["cmdline"]) if name in (one.info["cmdline"] or [])]
    return [one for one in named if one.environ().get(RUN_MARK) == mark]


def _kill_one(shards: Path, killed: list[int]) -> None:
    """Kill a follower once the second shard is written."""
    deadline = time.monotonic() + 120
    while len(list(shards.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in _followers():
        process.send_signal(signal.SIGKILL)
        killed.append(process.pid)


def test_a_killed_follower_costs_nothing_but_time(
    tiny_cache: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig

    output, killed = tmp_path / "cache", list[int]()
    killer = threading.Thread(target=_kill_one, args=(output / "shards", killed))
    killer.start()
    manifest = cache_activations(
        str(output),
        TargetConfig(model=str(tiny_target), tensor_parallel=2),
        ChatsConfig(path=str(chats_file)),
        CacheConfig(**CACHE_SETTINGS),
        CaptureConfig(),
    )
    killer.join()
    assert len(killed) == 1, "nothing was killed: the run was over before"
    store, wanted_store = CacheStore(str(output)), CacheStore(str(tiny_cache))
    wanted = read_manifest(wanted_store)
    assert manifest.lengths == wanted.lengths
    ours, theirs = TapDecoder.open(store, manifest), TapDecoder.open(wanted_store, wanted)
    shard = next(iter(wanted.shards))
    for name in wanted.columns:
        found = ours.decode(store.read_row_groups(shard, [0], [name]), name)
        expected = theirs.decode(wanted_store.read_row_groups(shard, [0], [name]), name)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)  # stored in 16 bits
