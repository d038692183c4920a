"""Columns added to shards, without Ray: what counts as that, bytes that stay, and the command that is to be typed."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_targets import save_target

from moray.activations.capture.attempts import MAX_ATTEMPTS, Attempts
from moray.activations.capture.calibration import calibrate
from moray.activations.capture.extend import ShardExtender
from moray.activations.capture.extract import ShardWriter, token_arrays
from moray.activations.format.channels import read_known_channels, write_channels
from moray.activations.format.disk_space import DiskSpace
from moray.activations.format.records import PlanRecord, shard_token_bytes
from moray.activations.format.schema import TOKENS_SCHEMA, CacheConfig, bytes_per_token, column_values
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import (
    begin_addition,
    check_addition_fits,
    columns_to_add,
    command_to_add,
    extended_plan,
    finish_replaced,
    plan_addition,
)
from moray.activations.planning.shards import only_columns, plan_shards, tap_columns
from moray.activations.reading.collate import needed_columns
from moray.batch import TapNeeds
from moray.errors import ConfigError, DataError, StorageFullError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig

LENGTHS = (5, 17, 9, 30, 2)
FEW = CacheConfig(hidden_depths=(-1, -2), kv_layers=(2,), batch_tokens=64)
MANY = CacheConfig(hidden_depths=(-4, -1, -2), kv_layers=(0, 2), batch_tokens=64)
FEW_INT8 = FEW.model_copy(update={"kv_codec": "int8", "hidden_codec": "int4"})
MANY_INT8 = MANY.model_copy(update={"kv_codec": "int8", "hidden_codec": "int4"})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_target(tmp_path_factory.mktemp("target"))
    return Target.load(TargetConfig(model=str(folder), device="cpu"))


def _plan(target: Target, config: CacheConfig, **changes: Any) -> PlanRecord:
    values = {
        "format": 1,
        "target": target.spec.for_plan,
        "text_fingerprint": "text",
        "chats": {"path": "chats.jsonl"},
        "files": {"chats.jsonl": 9},
        "cache": config.for_plan,
        "columns": column_values(tap_columns(target.spec, config)),
    }
    return PlanRecord.of(values | changes)


def _write(folder: Path, target: Target, config: CacheConfig) -> CacheStore:
    """A cache of one shard with several row groups."""
    store = CacheStore(str(folder))
    rows = [[(7 * i + k) % 97 for k in range(length)] for i, length in enumerate(LENGTHS)]
    masks = [[k % 2 == 0 for k in range(length)] for length in LENGTHS]
    part = pa.table({"uid": list("abcde"), "tokens": rows, "response_mask": masks}, schema=TOKENS_SCHEMA)
    store.write_table("tokens/part-00000.parquet", part)
    store.begin_or_resume(_plan(target, config).values)
    _calibrate(store, target, config)
    ShardWriter(target, store, config).write(plan_shards("part-00000", LENGTHS, config, 100)[0])
    return store


def _calibrate(store: CacheStore, target: Target, config: CacheConfig) -> None:
    """As the job does before it writes or extends the first shard."""
    known = read_known_channels(store)
    batch = token_arrays(store.read_table("tokens/part-00000.parquet"))
    if found := calibrate(target, config, [batch], known).channels:
        write_channels(store, {**known, **found})


def _file(store: CacheStore) -> Path:
    return Path(store.uri) / "shards" / "00000-00000.parquet"


@pytest.mark.parametrize(("few", "many"), [(FEW, MANY), (FEW_INT8, MANY_INT8)])
def test_an_extended_shard_is_the_one_that_all_columns_at_once_make(
    tmp_path: Path, target: Target, few: CacheConfig, many: CacheConfig
) -> None:
    store, whole = _write(tmp_path / "few", target, few), _write(tmp_path / "many", target, many)
    before, old = pq.read_table(_file(store)), store.read_marker("00000-00000")
    _calibrate(store, target, many)
    info = ShardExtender(target, store, many).extend("00000-00000")
    assert len(info.row_groups) > 1
    wanted = whole.read_marker("00000-00000")
    assert store.committed() == {"00000-00000": info}
    assert info == replace(wanted, sha256=info.sha256, bytes=info.bytes)
    assert list(info.hidden_square_sums) == list(wanted.hidden_square_sums)
    assert info.sha256 == store.sha256("shards/00000-00000.parquet") != old.sha256
    after = pq.read_table(_file(store))
    assert after.equals(pq.read_table(_file(whole)), check_metadata=True)
    assert after.select(before.column_names).equals(before)
    assert pq.ParquetFile(_file(store)).num_row_groups == len(info.row_groups)
    time = _file(store).stat().st_mtime_ns
    assert ShardExtender(target, store, many).extend("00000-00000") == info
    assert _file(store).stat().st_mtime_ns == time
    assert store.names("shards", "") == ["00000-00000.json", "00000-00000.parquet"]


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_kill_between_file_and_marker_is_mended_whichever_came_first(
    tmp_path: Path, target: Target, is_in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _write(tmp_path, target, FEW)
    old, data = store.read_marker("00000-00000"), _file(store).read_bytes()

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(CacheStore, "commit", kill)
    with pytest.raises(Killed):
        ShardExtender(target, store, MANY).extend("00000-00000")
    monkeypatch.undo()
    assert store.names("shards", ".next") == ["00000-00000.next"]
    if not is_in_place:
        _file(store).write_bytes(data)
    time = _file(store).stat().st_mtime_ns
    finish_replaced(store)
    assert store.names("shards", "") == ["00000-00000.json", "00000-00000.parquet"]
    assert _file(store).stat().st_mtime_ns == time
    info = store.read_marker("00000-00000")
    assert (info == old) is not is_in_place
    assert (info.bytes, info.sha256) == (_file(store).stat().st_size, store.sha256("shards/00000-00000.parquet"))


def test_what_fails_leaves_the_shard_as_it_was(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _write(tmp_path, target, FEW_INT8)
    files = {path: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    with pytest.raises(DataError, match=r"channels.parquet' has no column 'kv.00'"):
        ShardExtender(target, store, MANY_INT8)
    _calibrate(store, target, MANY_INT8)
    extender = ShardExtender(target, store, MANY_INT8)

    def full(*_: object) -> None:
        raise StorageFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("moray.activations.capture.extend.TapEncoder.columns_of", full)
        with pytest.raises(StorageFullError):
            extender.extend("00000-00000")
    channels = read_known_channels(store)
    write_channels(store, channels | {"hidden.-1": channels["hidden.-2"]})
    with pytest.raises(DataError, match=r"channels.parquet' is not the one that shard '00000-00000' was written with"):
        ShardExtender(target, store, MANY_INT8).extend("00000-00000")
    assert all(Attempts(store, "shards").begin("00000-00000") for _ in range(MAX_ATTEMPTS))
    with pytest.raises(DataError, match="4 target replicas died over shard '00000-00000'"):
        extender.extend("00000-00000")
    store.clear_temporary()
    assert {path: path.read_bytes() for path in (tmp_path / "shards").iterdir()} == files


def test_only_more_columns_of_the_same_cache_are_an_addition(tmp_path: Path, target: Target) -> None:
    store, plan = CacheStore(str(tmp_path)), _plan(target, FEW)
    assert columns_to_add(store, plan.values) == []
    store.begin_or_resume(plan.values)
    assert columns_to_add(store, plan.values) == []
    more = _plan(target, MANY).values
    assert columns_to_add(store, more) == ["kv.00", "hidden.-4"]
    unread = more | {"target": more["target"] | {"fingerprint": ""}}
    assert columns_to_add(store, unread) == ["kv.00", "hidden.-4"]
    others = [
        _plan(target, MANY, format=2).values,
        more | {"target": more["target"] | {"fingerprint": "other"}},
        *(
            _plan(target, MANY.model_copy(update=changes)).values
            for changes in (
                {"hidden_codec": "fp8"},
                {"hidden_depths": (-1, -3)},
                {"max_length": 5},
                {"compression": "zstd"},
                {"column_codecs": {"kv.02": "int8"}},
            )
        ),
    ]
    assert [columns_to_add(store, other) for other in others] == [[]] * len(others)
    # Of columns that are new alone, the codec is free, and a new default for kinds that the cache has none of.
    single = MANY.model_copy(update={"column_codecs": {"kv.00": "int8"}})
    assert columns_to_add(store, _plan(target, single).values) == ["kv.00", "hidden.-4"]


def test_shards_are_still_cut_as_they_were(tmp_path: Path, target: Target) -> None:
    store, plan = CacheStore(str(tmp_path)), _plan(target, FEW)
    store.begin_or_resume(plan.values)
    assert shard_token_bytes(plan) == bytes_per_token(plan.columns)
    grown = extended_plan(store, _plan(target, MANY))
    assert shard_token_bytes(grown) == bytes_per_token(plan.columns)
    store.write_json("plan.json", grown.values)
    store.begin_or_resume(_plan(target, MANY).values)
    again = extended_plan(store, _plan(target, CacheConfig(hidden_depths=(-4, -1, -2, -3))))
    assert shard_token_bytes(again) == bytes_per_token(plan.columns)


def test_growth_is_counted_and_refused_where_there_is_no_room(tmp_path: Path, target: Target) -> None:
    store, plan = _write(tmp_path, target, FEW), _plan(target, MANY)
    growth = plan_addition(store, plan, ["kv.00", "hidden.-4"], store.committed(), missing_tokens=10)
    all_columns, new = plan.columns, {name: plan.columns[name] for name in ("kv.00", "hidden.-4")}
    assert growth.bytes == sum(LENGTHS) * bytes_per_token(new) + 10 * bytes_per_token(all_columns)
    assert growth.largest == sum(LENGTHS) * bytes_per_token(all_columns)
    assert growth.announcement.startswith("adding kv.00, hidden.-4 to 1 shards: ")
    check_addition_fits(growth, DiskSpace(None), "x")
    check_addition_fits(growth, DiskSpace(None, max_bytes=100 + growth.bytes, written=100), "x")
    with pytest.raises(ConfigError, match=r"adding kv.00, hidden.-4 to 'x' takes about .*cache.max_bytes allows"):
        check_addition_fits(growth, DiskSpace(None, max_bytes=99 + growth.bytes, written=100), "x")
    with pytest.raises(ConfigError, match=r"but .* are free, of which 500 bytes must stay free"):
        check_addition_fits(growth, DiskSpace(growth.bytes + 499, reserve=500), "x")
    ShardExtender(target, store, MANY).extend("00000-00000")
    done = plan_addition(store, plan, ["kv.00", "hidden.-4"], store.committed())
    assert (done.shards, done.bytes, done.tokens_left, done.tokens) == ({}, 0, 0, sum(LENGTHS))


def test_kept_columns_lose_their_own_codecs_alone() -> None:
    config = CacheConfig(column_codecs={"kv.03": "int8", "hidden.-1": "fp8"}, shard_mib=3)
    chosen = only_columns(config, ["kv.03", "kv.10", "hidden.-2"])
    assert (chosen.kv_layers, chosen.hidden_depths) == ((3, 10), (-2,))
    assert chosen.column_codecs == {"kv.03": "int8"}
    assert chosen.shard_mib == 3


ARGV = ["/here/pipelines/cache_activations.py", "target.yaml", "chats.path=my chats.jsonl", "cache.kv_layers=[2]"]


def _record(store: CacheStore, argv: list[str], **settings: Any) -> None:
    cache = FEW.model_dump(mode="json", include={"hidden_depths", "kv_layers", "kv_codec", "hidden_codec"})
    defaults = {"target": {"model": "m"}, "chats": {"path": "c.jsonl"}, "output": store.uri}
    settings["cache"] = cache | settings.get("cache", {})
    store.write_text("run.yaml", yaml.safe_dump({"argv": argv, "config": defaults | settings}))


def test_the_command_is_the_one_that_made_the_cache_with_all_columns(tmp_path: Path, target: Target) -> None:
    store = CacheStore(str(tmp_path / "a cache"))
    store.begin_or_resume(_plan(target, FEW).values)
    wanted = "'cache.hidden_depths=[-1,-2,-4]' 'cache.kv_layers=[0,2]'"
    missing = ["kv.00", "hidden.-4"]
    assert command_to_add(store, missing) == f"the command that made '{store.uri}', with {wanted}"
    _record(store, ARGV)
    told = "python -m pipelines.cache_activations target.yaml 'chats.path=my chats.jsonl' "
    assert command_to_add(store, missing) == told + wanted
    assert command_to_add(store, ["hidden.-3"]) == f"{told}'cache.kv_layers=[2]' 'cache.hidden_depths=[-1,-2,-3]'"
    # What is being added already goes on as it was asked for.
    codecs = {"hidden.-4": "int8"}
    begun = _plan(target, MANY.model_copy(update={"column_codecs": codecs}))
    begin_addition(store, begun, missing)
    told_begun = (
        "'cache.hidden_depths=[-4,-1,-2]' 'cache.kv_layers=[0,2]' 'cache.column_codecs={\"hidden.-4\":\"int8\"}'"
    )
    assert command_to_add(store, ["hidden.-4"]) == told + told_begun
    store.write_json("plan.json", begun.values)  # a kill before the manifest is written
    assert command_to_add(store, missing) == told + told_begun
    store.write_json("plan.json", _plan(target, FEW).values)
    store.delete("adding.json")
    _record(store, ARGV, output="elsewhere")
    assert command_to_add(store, missing) == f"{told}'output={store.uri}' {wanted}"
    # The demo calls the command by itself: then the settings are what there is.
    _record(store, ["/here/pipelines/demo.py", "demo.yaml"], cache={"max_length": 9}, capture={"num_targets": 2})
    words = shlex.split(command_to_add(store, missing))
    assert words[3:] == [
        f"output={store.uri}", "target.model=m", "chats.path=c.jsonl", "cache.max_length=9", "capture.num_targets=2",
        "cache.hidden_depths=[-1,-2,-4]", "cache.kv_layers=[0,2]",
    ]  # fmt: skip
    (tmp_path / "a cache" / "run.yaml").write_text("[]")
    assert command_to_add(store, missing).startswith("the command that made")


def test_a_drafter_s_missing_columns_are_named_with_the_command(tmp_path: Path, target: Target) -> None:
    store, plan = CacheStore(str(tmp_path)), _plan(target, FEW)
    store.begin_or_resume(plan.values)
    _record(store, ARGV)
    needs = TapNeeds(kv_layers=(1, 2), hidden_depths=(-3, -1))
    with pytest.raises(
        DataError, match=r"no column 'kv.01', .*: to add kv.01, hidden.-3, run python -m pipe"
    ) as caught:
        needed_columns(needs, plan.columns, store)
    assert str(caught.value).endswith("'cache.hidden_depths=[-1,-2,-3]' 'cache.kv_layers=[1,2]'")
    assert "\n" not in str(caught.value)
    store.write_json("plan.json", _plan(target, FEW.model_copy(update={"kv_layers": None})).values)
    _record(store, ARGV[:-1], cache={"kv_layers": None})
    assert command_to_add(store, ["hidden.-3"]).endswith("'chats.path=my chats.jsonl' 'cache.hidden_depths=[-1,-2,-3]'")
