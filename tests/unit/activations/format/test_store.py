"""The store: files whole or not at all, claims that name what differs, damage that names its file."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moray.activations.format.manifest import read_manifest, write_manifest
from moray.activations.format.records import shard_token_bytes
from moray.activations.format.schema import Column
from moray.activations.format.shard_info import ShardInfo
from moray.activations.format.store import CacheStore
from moray.errors import ConfigError, DamagedError, DataError, MismatchError, UnreachableError

PLAN = {
    "format": 1,
    "target": {
        "family": "llama", "num_layers": 2, "hidden_size": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2,
        "intermediate_size": 4, "vocab_size": 9, "max_positions": 64, "rope_theta": 10000.0, "norm_eps": 1e-06,
        "fingerprint": "f",
    },
    "text_fingerprint": "t",
    "chats": {"path": "chats.jsonl"},
    "files": {"chats.jsonl": 9},
    "cache": {"hidden_depths": [-1], "kv_layers": []},
    "columns": {"hidden.-1": {"codec": "float32", "width": 2}},
}  # fmt: skip
"""As an early version wrote it: later keys are not there."""


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    return CacheStore(str(tmp_path / "cache"))


def _info(name: str) -> ShardInfo:
    return ShardInfo(name, 2, 7, 100, "00", [[4, 3]], {"hidden.-1": 28.0})


def _files(store: CacheStore) -> list[str]:
    root = Path(store.uri)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_write_that_fails_leaves_nothing(store: CacheStore) -> None:
    def write_half() -> None:
        with store.open_output("shards/a.parquet") as sink:
            sink.write(b"first half")
            assert len(_files(store)) == 1
            assert not store.exists("shards/a.parquet")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_half()
    assert _files(store) == []


def test_a_write_that_fails_keeps_the_file_that_was_there(store: CacheStore) -> None:
    store.write_json("manifest.json", {"old": 1})
    with pytest.raises(TypeError):
        store.write_json("manifest.json", {"new": object()})
    assert store.read_json("manifest.json") == {"old": 1}
    assert _files(store) == ["manifest.json"]


def test_a_file_appears_whole_with_its_size_and_hash(store: CacheStore) -> None:
    with store.open_output("shards/a.bin") as sink:
        sink.write(b"one")
        sink.write(memoryview(b"two"))
        assert _files(store) != ["shards/a.bin"]
    assert _files(store) == ["shards/a.bin"]
    assert sink.num_bytes == sink.tell() == 6
    assert sink.sha256 == hashlib.sha256(b"onetwo").hexdigest()
    assert (Path(store.uri) / "shards/a.bin").read_bytes() == b"onetwo"


def test_two_writers_of_one_name_do_not_mix(store: CacheStore) -> None:
    """A worker of a job killed a moment ago may still write while the next job makes the same shard."""
    with store.open_output("shards/a.bin") as one:
        one.write(b"aaaa")
        with store.open_output("shards/a.bin") as two:
            two.write(b"bb")
        one.write(b"aaaa")
    assert (Path(store.uri) / "shards/a.bin").read_bytes() == b"aaaaaaaa"


def test_claim_goes_on_with_the_same_plan_and_clears_half_written_files(store: CacheStore) -> None:
    plan = {"format": 1, "cache": {"depths": (-1, -2)}}
    store.begin_or_resume(plan)
    for name in ("shards/00000-00000.parquet.1234.tmp", "tokens/part-00000.parquet.77.tmp", "shards/kept.parquet"):
        path = Path(store.uri) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    store.begin_or_resume(plan)
    assert _files(store) == ["plan.json", "shards/kept.parquet"]


def test_claim_refuses_another_plan_naming_the_key_and_both_values(store: CacheStore) -> None:
    store.begin_or_resume({"format": 1, "cache": {"max_length": 384}})
    with pytest.raises(MismatchError) as caught:
        store.begin_or_resume({"format": 1, "cache": {"max_length": 512}})
    message = str(caught.value)
    assert f"'{store.uri}' was cached with cache = " in message
    assert '{"max_length": 384}, now it is {"max_length": 512}' in message
    assert "another output" in message
    assert store.read_json("plan.json")["cache"] == {"max_length": 384}


def test_a_claim_that_is_refused_leaves_what_another_job_is_writing(store: CacheStore) -> None:
    store.begin_or_resume({"format": 1})
    (Path(store.uri) / "shards").mkdir()
    half = Path(store.uri) / "shards/00000-00000.parquet.1234.tmp"
    half.write_bytes(b"half")
    with pytest.raises(MismatchError):
        store.begin_or_resume({"format": 2})
    assert half.exists()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), OSError("AWS Error NETWORK_CONNECTION"), None])
def test_a_file_that_cannot_be_reached_is_not_called_damaged(
    store: CacheStore, error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error or OSError("Couldn't deserialize thrift")  # as Arrow words damage

    (Path(store.uri) / "shards").mkdir(parents=True)
    (Path(store.uri) / "shards/a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", fail)
    message = "cannot be read: .*remove it" if error is None else "cannot be reached: .*check its owner and the disk"
    with pytest.raises(DataError, match=message) as caught:
        store.read_row_groups("a", [0], ["uid"])
    assert isinstance(caught.value, UnreachableError) is (error is not None)


def test_only_shards_with_a_marker_count(store: CacheStore) -> None:
    store.write_table("shards/b.parquet", pa.table({"x": [1]}))
    assert store.committed() == {}
    store.commit(_info("b"))
    assert store.committed() == {"b": _info("b")}


@pytest.mark.parametrize("content", [b"", b'{"rows": ', b"\xff\xfe"])
def test_damaged_json_is_named(store: CacheStore, content: bytes) -> None:
    store.commit(_info("a"))
    (Path(store.uri) / "shards/a.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"^'{store.uri}/shards/a.json' is damaged: .*remove it"):
        store.committed()


def test_missing_json_says_what_to_run(store: CacheStore) -> None:
    with pytest.raises(DataError, match=rf"'{store.uri}/plan.json' is missing.*pipelines.cache_activations"):
        store.read_json("plan.json")


@pytest.mark.parametrize("keep", [0, 10, -20])
def test_damaged_shards_and_parts_are_named(store: CacheStore, keep: int) -> None:
    for name in ("shards/a.parquet", "tokens/a.parquet"):
        store.write_table(name, pa.table({"x": list(range(100))}))
        path = Path(store.uri) / name
        path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"shard '{store.uri}/shards/a.parquet' cannot be read: .*remove it and its"):
        store.read_row_groups("a", [0], ["x"])
    with pytest.raises(DataError, match=rf"'{store.uri}/tokens/a.parquet' cannot be read"):
        store.read_table("tokens/a.parquet")


def test_a_missing_shard_is_named(store: CacheStore) -> None:
    with pytest.raises(DataError, match=r"shards/gone.parquet' cannot be read"):
        store.read_row_groups("gone", [0], ["x"])


def test_only_named_columns_and_row_groups_are_read(store: CacheStore) -> None:
    with (
        store.open_output("shards/a.parquet") as sink,
        pq.ParquetWriter(sink, pa.schema([("x", "i4"), ("y", "i4")])) as w,
    ):
        for first in (0, 10):
            w.write_table(pa.table({"x": pa.array([first], "i4"), "y": pa.array([-first], "i4")}))
    assert store.read_row_groups("a", [1], ["y"]).to_pydict() == {"y": [-10]}


def test_a_uri_serves_as_well_as_a_path(store: CacheStore, tmp_path: Path) -> None:
    store.write_json("plan.json", {"a": 1})
    assert CacheStore((tmp_path / "cache").as_uri()).read_json("plan.json") == {"a": 1}
    with pytest.raises(ConfigError, match="'nowhere://x' is no path or URI that can be opened"):
        CacheStore("nowhere://x").exists("plan.json")


def test_manifest_sums_up_and_reads_back(store: CacheStore) -> None:
    store.begin_or_resume(PLAN)
    for name in ("a", "b"):
        (Path(store.uri) / "shards").mkdir(exist_ok=True)
        (Path(store.uri) / f"shards/{name}.parquet").write_bytes(bytes(100))
        store.commit(_info(name))
    manifest = write_manifest(store, {"chats": 4, "dropped": 0, "bad": 0})
    assert manifest == read_manifest(store)
    assert manifest.num_tokens == 14
    assert manifest.lengths == {"a": [[4, 3]], "b": [[4, 3]]}
    assert manifest.hidden_rms == {-1: 2.0}
    assert manifest.chats == {"chats": 4, "dropped": 0, "bad": 0}
    stored = json.loads((Path(store.uri) / "manifest.json").read_text())
    assert stored["totals"] == {"shards": 2, "rows": 4, "tokens": 14, "bytes": 200}


def test_an_absent_an_unfinished_and_a_newer_cache_are_told_apart(store: CacheStore) -> None:
    with pytest.raises(DataError, match=rf"activation cache '{store.uri}' is not there: run"):
        read_manifest(store)
    store.begin_or_resume({})
    with pytest.raises(DataError, match="is unfinished: run"):
        read_manifest(store)
    store.write_json("manifest.json", {"format": 99})
    with pytest.raises(DataError, match="has format 99; this version reads 1"):
        read_manifest(store)


def test_a_plan_has_types_and_is_written_as_it_was(store: CacheStore) -> None:
    """What an early version left out stays out; what a later one adds is kept, and so are numbers and order."""
    values = PLAN | {"cache": PLAN["cache"] | {"column_codecs": {"hidden.-1": "float32"}}, "added_later": {"a": [1.5]}}
    store.begin_or_resume(values)
    plan = store.read_plan()
    assert (plan.target.vocab_size, plan.cache.hidden_depths, plan.cache.shard_mib) == (9, (-1,), 256)
    assert (plan.columns, plan.dtype, plan.content_rule) == ({"hidden.-1": Column("float32", 2)}, None, None)
    assert plan.values == values == store.read_json("plan.json")
    assert list(plan.values["target"]) == list(PLAN["target"])
    assert json.dumps(plan.values) == json.dumps(values)
    store.begin_or_resume(plan.values)
    assert shard_token_bytes(plan) == 8
    assert shard_token_bytes(plan.model_copy(update={"shard_token_bytes": 5})) == 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"columns": {"hidden.-1": {"codec": "float33", "width": 2}}}, "columns.hidden.-1.codec: "),
        ({"text_fingerprint": None}, "text_fingerprint: "),
        ({"target": {"family": "llama"}}, "target.num_layers: "),
    ],
)
def test_a_plan_that_lacks_something_is_named_as_damaged(store: CacheStore, change: dict, reason: str) -> None:
    store.begin_or_resume(PLAN | change)
    with pytest.raises(DamagedError, match=rf"plan.json' is damaged: {reason}") as caught:
        store.read_plan()
    assert "\n" not in str(caught.value)
    store.write_json("manifest.json", {"format": 1, "plan": PLAN | change, "shards": [], "hidden_rms": {}})
    with pytest.raises(DamagedError, match=rf"manifest.json' is damaged: {reason}"):
        read_manifest(store)
