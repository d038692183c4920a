"""The whole way on an object store: captured, read by the stream, compacted, verified; and resumed after a kill."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
READ = """
import json, sys
from moray.cluster.session import ray_session
from moray.cluster.configs import RayConfig
with ray_session(RayConfig(num_cpus=3)):
    from moray.activations.reading.epochs import plan_epoch
    from moray.activations.format.manifest import read_manifest
    from moray.activations.format.store import CacheStore
    from moray.batch import TapNeeds
    from moray.cluster.caching.compact import compact
    from moray.cluster.training.stream import Reader, stream_updates
    def epoch():
        manifest = read_manifest(CacheStore(sys.argv[1]))
        plan = plan_epoch(manifest.lengths, 384, 0, 0, 1)[0]
        reader = Reader(sys.argv[1], manifest, TapNeeds((0, 2), (-1,)))
        batches = [data_shard.whole("cpu") for (data_shard,) in stream_updates(reader, {0: plan})]
        return sorted(row[mask].tolist() for b in batches for row, mask in zip(b.tokens, b.response_mask))
    before = epoch()
    shards = compact(sys.argv[1], 16, 2)
    print(json.dumps({"chats": len(before), "same": before == epoch(), "shards": shards}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a user sets: address and credentials of the server, moto in a process of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("w")
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings.items():
            patch.setenv(key, value)
        from moray.activations.format.store import CacheStore

        CacheStore("s3://moray-caches?allow_bucket_creation=true").check()
        yield settings
    process.kill()
    process.wait()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_cache_lives_on_an_object_store(
    is_killed: bool,
    environment: dict[str, str],
    tiny_target: Path,
    chats_file: Path,
    tmp_path: Path,
    start_pipeline: Callable[..., Any],
) -> None:
    from moray.activations.format.manifest import read_manifest
    from moray.activations.format.store import CacheStore

    uri = f"s3://moray-caches/{'killed' if is_killed else 'whole'}"
    config = {
        "target": {"model": str(tiny_target)},
        "chats": {"path": str(chats_file)},
        "cache": {"max_length": 384, "batch_tokens": 384, "shard_mib": 1, "chats_per_part": 4},
        "output": uri + "/",
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    store = CacheStore(uri)
    if is_killed:
        first = start_pipeline("cache_activations", str(path))
        first.kill_when(lambda: len(store.names("shards", ".json")) >= 7)
    done = store.committed()
    assert (7 if is_killed else 0) <= len(done) < 15
    second = start_pipeline("cache_activations", str(path))
    assert second.finish() == 0, second.output
    manifest = read_manifest(store)
    assert {name: manifest.shards[name] for name in done} == done
    assert sum(shard.rows for shard in manifest.shards.values()) == 60

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False
        )

    read = run("-c", READ, uri)
    assert read.returncode == 0, read.stderr
    figures = json.loads(read.stdout.splitlines()[-1])
    assert (figures["chats"], figures["same"]) == (60, True)
    assert figures["shards"][1] < figures["shards"][0] == len(manifest.shards)
    assert environment["AWS_SECRET_ACCESS_KEY"] not in store.read_text("run.yaml").replace("moray-tests", "").split()
    if not is_killed:  # the rest takes three more starts of Ray
        return
    checked = run("-m", "pipelines.cache_activations", "verify", uri, "verify.sample_chats=2")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with store.filesystem.open_output_stream(store.path(f"shards/{min(read_manifest(store).shards)}.parquet")) as sink:
        sink.write(b"PAR1")
    checked = run("-m", "pipelines.cache_activations", "verify", uri)
    assert checked.returncode == 1
    assert "it has 4 bytes, its marker says" in checked.stdout
    assert checked.stderr.startswith(f"error: '{uri}' has ")
