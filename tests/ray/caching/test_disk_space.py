"""Quantised caches on Ray, plans that come true or are refused, and a disk that fills up in the middle."""

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import Manifest, read_manifest
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import collate
from moray.activations.reading.epochs import plan_epoch
from moray.batch import TapNeeds
from moray.data.ultrachat import ChatsConfig
from moray.errors import ConfigError, DataError, StorageFullError
from moray.targets.spec import TargetConfig

SETTINGS: dict[str, Any] = {"max_length": 384, "batch_tokens": 1024, "shard_mib": 1, "chats_per_part": 12}

pytestmark = pytest.mark.usefixtures("ray_session")


def _cache(output: Path, target: Path, chats: Path, max_chats: int | None = None, **changes: Any) -> Manifest:
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig

    return cache_activations(
        str(output),
        TargetConfig(model=str(target)),
        ChatsConfig(path=str(chats), max_chats=max_chats),
        CacheConfig(**(SETTINGS | changes)),
        CaptureConfig(num_targets=2, cpus_per_target=0.5),
    )


def _files(folder: Path) -> dict[str, bytes]:
    """What is in the cache; the forecast, which tells the time it was made at, aside."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found.pop("forecast.json", None)
    found.pop("calibration.json", None)
    return found


@pytest.mark.slow
def test_a_quantised_cache_is_close_to_the_unquantised_one(
    tiny_cache: Path, tiny_target: Path, chats_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from read_back import stream_batches

    output = tmp_path / "cache"
    codecs = {"kv_codec": "int8", "hidden_codec": "fp8", "column_codecs": {"hidden.-1": "bfloat16"}}
    manifest = _cache(output, tiny_target, chats_file, **codecs)
    assert manifest.columns["kv.01"].codec == "int8"
    told = capsys.readouterr().out
    plan = json.loads((output / "forecast.json").read_text())
    assert f"60 chats, {manifest.num_tokens:,} tokens in {len(manifest.shards)} shards" in told
    assert "tokens/s of each of 2 targets" in told
    assert (plan["tokens"], plan["shards"]) == (manifest.num_tokens, len(manifest.shards))
    written = sum(path.stat().st_size for name in ("tokens", "shards") for path in (output / name).glob("*.parquet"))
    assert sum(plan["bytes"].values()) == pytest.approx(written, rel=0.05)

    needs = TapNeeds(kv_layers=(0, 1, 2), hidden_depths=(-1, -2))
    epoch = plan_epoch(manifest.lengths, batch_tokens=384, seed=3, epoch=0, num_data_shards=1)[0].before(4)
    store = CacheStore(str(tiny_cache))
    exact = read_manifest(store)
    rows = {}
    columns = ["num_tokens", "tokens", "response_mask", *exact.columns]
    for name, groups in exact.lengths.items():
        table = store.read_row_groups(name, list(range(len(groups))), columns)
        for row in range(table.num_rows):
            rows[tuple(table.column("tokens")[row].as_py())] = table.slice(row, 1)
    num_chats = 0
    for batch in stream_batches(str(output), manifest, epoch, needs):
        for row, length in enumerate(batch.lengths.tolist()):
            wanted = collate(rows[tuple(batch.tokens[row, :length].tolist())], needs, TapDecoder.open(store, exact))
            assert batch.taps.kv is not None
            assert wanted.taps.kv is not None
            for got, expected, most in (
                (batch.taps.kv[row, :length], wanted.taps.kv[0], 0.02),
                (batch.taps.hidden[-1][row, :length], wanted.taps.hidden[-1][0], 0.01),
                (batch.taps.hidden[-2][row, :length], wanted.taps.hidden[-2][0], 0.06),
            ):
                wrong = (got.float() - expected.float()).square().mean() / expected.float().var()
                assert float(wrong) < most**2
            num_chats += 1
    assert num_chats >= 4


@pytest.mark.soak
def test_a_removed_shard_is_made_again_with_the_same_channels(
    tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "cache"
    manifest = _cache(output, tiny_target, chats_file, kv_codec="int4", hidden_codec="int4")
    before = _files(output)
    name = next(iter(manifest.shards))
    for suffix in ("json", "parquet"):
        (output / "shards" / f"{name}.{suffix}").unlink()
    (output / "forecast.json").unlink()
    assert _cache(output, tiny_target, chats_file, kv_codec="int4", hidden_codec="int4") == manifest
    assert _files(output) == before
    (output / "shards" / f"{name}.json").unlink()
    (output / "channels.parquet").unlink()
    with pytest.raises(DataError, match=r"channels.parquet' is missing"):
        _cache(output, tiny_target, chats_file, kv_codec="int4", hidden_codec="int4")


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_the_advice_can_be_typed(
    tiny_cache: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "cache"
    size = sum(shard.bytes for shard in read_manifest(CacheStore(str(tiny_cache))).shards.values())
    with pytest.raises(ConfigError, match=r"cache.max_bytes allows .*what fits: .*cache.hidden_codec=.*max_chats=\d"):
        _cache(output, tiny_target, chats_file, max_bytes=size // 2)
    assert not output.exists()
    # Exact numbers are refused after tokenising too: nothing is claimed then.
    sampled = "moray.activations.planning.cache_spec.project"
    with pytest.MonkeyPatch.context() as patch:
        from moray.activations.planning.plan import Workload

        patch.setattr(sampled, lambda sample, rows, cache: Workload(1, 1, 1, 1, 1))
        with pytest.raises(ConfigError, match=r"^the cache takes \d.*cache.max_bytes"):
            _cache(output, tiny_target, chats_file, max_bytes=size // 2)
    assert _files(output) == {}


@pytest.mark.soak
def test_what_was_advised_fits(tiny_cache: Path, tiny_target: Path, chats_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "cache"
    size = sum(shard.bytes for shard in read_manifest(CacheStore(str(tiny_cache))).shards.values())
    manifest = _cache(output, tiny_target, chats_file, max_bytes=size, kv_codec="int4", hidden_codec="fp8")
    assert sum(shard.bytes for shard in manifest.shards.values()) < size
    # A quota is no part of what a cache is.
    assert _cache(output, tiny_target, chats_file, kv_codec="int4", hidden_codec="fp8") == manifest


@contextmanager
def _small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(ballast: Path, leave: int) -> None:
    """Take the space of a file's disk but for `leave` bytes, or all where others write at the same time."""
    status = os.statvfs(ballast.parent)
    with ballast.open("wb", buffering=0) as file:
        try:
            file.write(b"\0" * max(0, status.f_bavail * status.f_frsize - leave))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


SMALL_PARTS: dict[str, Any] = {"chats_per_part": 5, "kv_codec": "int8"}


@pytest.fixture(scope="module")
def unbroken(ray_session: None, tiny_target: Path, chats_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised cache that was made without a disturbance."""
    folder = tmp_path_factory.mktemp("unbroken") / "cache"
    _cache(folder, tiny_target, chats_file, **SMALL_PARTS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("tokens", marks=pytest.mark.soak), "shards"])
def test_a_disk_that_fills_up_ends_the_job_and_the_same_command_goes_on(
    stage: str, unbroken: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    expected = read_manifest(CacheStore(str(unbroken)))
    settings = SMALL_PARTS
    with _small_disk(tmp_path / "disk", 12) as disk:  # small, to be filled at once
        output = disk / "cache"
        ballast = disk / "ballast"

        def fill() -> None:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not list((output / stage).glob("*.json")):
                time.sleep(0.002)
            _fill(ballast, leave=24 << 10)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        with pytest.raises(StorageFullError) as caught:
            _cache(output, tiny_target, chats_file, **settings)
        thread.join()
        assert ballast.exists()
        message = str(caught.value)
        assert "cannot be written: no room is left (the disk is full)" in message
        assert "of the cache are written and safe, " in message
        assert ("about " in message) == (stage == "shards")
        assert message.endswith("make room, then run the same command again to resume")
        assert "\n" not in message
        time.sleep(1)
        assert not list(output.rglob("*.tmp"))
        assert not (output / "manifest.json").exists()
        kept = {path: path.stat().st_mtime_ns for path in (output / stage).glob("*.json")}
        assert kept

        ballast.unlink()
        assert _cache(output, tiny_target, chats_file, **settings).shards == expected.shards
        assert {path: path.stat().st_mtime_ns for path in kept} == kept
        assert _files(output) == _files(unbroken)
        assert sum(pq.read_metadata(path).num_rows for path in (output / "shards").glob("*.parquet")) == 60
