"""Caches by URI, on a real S3-compatible server: whole or absent, and one clear line for what is wrong."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from moray.activations.format.manifest import read_manifest
from moray.activations.format.scan import scan
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.errors import ConfigError, DataError


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """moto in a process of its own; address and credentials in the environment, as for users."""
    port = free_port()
    log = (tmp_path_factory.mktemp("moto") / "log").open("w")
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        CacheStore("s3://moray-tests?allow_bucket_creation=true").check()
        yield
    process.kill()
    process.wait()


def test_files_are_whole_or_absent(server: None) -> None:
    store = CacheStore("s3://moray-tests/whole/")

    def write_half() -> None:
        with store.open_output("shards/a.parquet") as sink:
            sink.write(b"x" * (12 << 20))  # more than one part of an upload
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_half()
    assert store.sizes("shards") == {}
    file = store.write_table("shards/a.parquet", pa.table({"x": [1, 2]}))
    assert store.sizes("shards") == {"a.parquet": file.num_bytes}
    assert store.sha256("shards/a.parquet", chunk_bytes=7) == file.sha256
    info = ShardInfo("a", 2, 7, file.num_bytes, file.sha256, [[4, 3]], {})
    store.commit(info)
    assert scan(CacheStore("s3://moray-tests/whole")).counting == {"a": info}
    assert store.read_table("shards/a.parquet").to_pydict() == {"x": [1, 2]}
    store.write_json("plan.json", {"a": 1})
    store.write_json("plan.json", {"a": 2})
    assert store.read_json("plan.json") == {"a": 2}
    store.uncommit("a")
    store.uncommit("a")
    assert store.sizes("shards") == {}


def test_a_wrong_bucket_is_one_line(server: None) -> None:
    store = CacheStore("s3://moray-nowhere/cache")
    with pytest.raises(DataError, match=r"^'s3://moray-nowhere/cache/plan.json' cannot be reached: .*not found"):
        store.check()
    with pytest.raises(DataError, match="'s3://moray-nowhere/cache' is not there"):
        read_manifest(store)


def test_an_address_where_nobody_answers_is_one_line_within_seconds(server: None) -> None:
    store = CacheStore(f"s3://moray-tests/cache?endpoint_override=127.0.0.1:{free_port()}&scheme=http")
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"cannot be reached: .*check bucket and address") as caught:
        store.check()
    assert time.monotonic() - begin < 30
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIAKEY:verysecret@bucket/cache",
        "s3://AKIAKEY@bucket/cache",
        "s3://bucket/cache?secret_key=verysecret",
        "abfss://account:verysecret@host/cache",
    ],
)
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"holds credentials.*AWS_ACCESS_KEY_ID") as caught:
        CacheStore(uri)
    assert "verysecret" not in str(caught.value)
    assert "AKIAKEY" not in str(caught.value)


def test_a_uri_without_a_password_is_none() -> None:
    assert CacheStore("abfss://container@account.dfs.core.windows.net/cache").uri.endswith("/cache")
    assert os.path.basename(CacheStore("/tmp/a@b:c/cache/").uri) == "cache"  # noqa: PTH119
