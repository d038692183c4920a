"""Columns added to a cache that is there: exact, refused where they do not fit, readable all the while."""

import hashlib
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from moray.activations.format.manifest import Manifest, read_manifest
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.maintenance.configs import VerifyConfig
from moray.activations.planning.adding import stored_columns
from moray.batch import TapNeeds
from moray.commands import load_command
from moray.config import validate
from moray.data.ultrachat import ChatsConfig
from moray.errors import ConfigError, DataError, MismatchError
from moray.provenance import read_run_yaml
from moray.targets.spec import TargetConfig

SETTINGS: dict[str, Any] = {"max_length": 384, "batch_tokens": 1024, "shard_mib": 1, "chats_per_part": 12}
FEW: dict[str, Any] = {"hidden_depths": (-1, -2), "kv_layers": (2,)}
MANY: dict[str, Any] = {"hidden_depths": (-1, -2, -4), "kv_layers": (0, 2)}
TEXT = ["uid", "num_tokens", "tokens", "response_mask"]

pytestmark = pytest.mark.usefixtures("ray_session")


def _cache(output: Path, target: Path, chats: Path, num_targets: int = 1, **changes: Any) -> Manifest:
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig

    return cache_activations(
        str(output),
        TargetConfig(model=str(target)),
        ChatsConfig(path=str(chats)),
        CacheConfig(**(SETTINGS | changes)),
        CaptureConfig(num_targets=num_targets),
    )


@pytest.fixture(scope="module")
def make(tiny_target: Path, chats_file: Path) -> Callable[..., Manifest]:
    """Cache the sixty chats, or go on with a cache of them."""
    return lambda output, **changes: _cache(output, tiny_target, chats_file, **changes)


@pytest.fixture(scope="module")
def few_columns(make: Callable[..., Manifest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete cache of few columns. Not to be written to."""
    folder = tmp_path_factory.mktemp("few")
    make(folder, **FEW)
    return folder


@pytest.fixture(scope="module")
def many_columns(make: Callable[..., Manifest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same chats with all columns at once. Not to be written to."""
    folder = tmp_path_factory.mktemp("many")
    make(folder, **MANY)
    return folder


@pytest.fixture
def cache(few_columns: Path, tmp_path: Path) -> Path:
    return shutil.copytree(few_columns, tmp_path / "cache")


def _by_chat(folder: Path, columns: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Every chat's values, bytes as they are stored."""
    names = [path.stem for path in (folder / "shards").glob("*.json")]
    tables = [pq.read_table(folder / "shards" / f"{name}.parquet", columns=columns) for name in names]
    rows = [row for table in tables for row in table.to_pylist()]
    found = {row["uid"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def _times(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def _verify(folder: Path, target: Path, **options: Any) -> None:
    from moray.cluster.caching.upkeep import VerifyCacheConfig
    from moray.cluster.caching.verify import verify_cache

    verify = VerifyConfig(**({"sample_chats": 2} | options))
    verify_cache(VerifyCacheConfig(output=str(folder), target=TargetConfig(model=str(target)), verify=verify))


def _row_groups(manifest: Manifest) -> dict[str, list[list[int]]]:
    return {name: info.row_groups for name, info in manifest.shards.items()}


@pytest.mark.slow
def test_added_columns_are_those_of_a_cache_made_with_all_at_once(
    cache: Path,
    few_columns: Path,
    many_columns: Path,
    make: Callable[..., Manifest],
    tiny_target: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = read_manifest(CacheStore(str(cache)))
    after = make(cache, num_targets=2, **MANY)
    assert f"adding kv.00, hidden.-4 to {len(before.shards)} shards" in capsys.readouterr().out
    assert _row_groups(after) == _row_groups(before)
    wanted = read_manifest(CacheStore(str(many_columns)))
    assert len(wanted.shards) >= len(before.shards) >= 5
    assert list(after.columns) == list(wanted.columns) == ["kv.00", "kv.02", "hidden.-1", "hidden.-2", "hidden.-4"]
    assert _by_chat(cache) == _by_chat(many_columns)
    old = [*TEXT, *before.columns]
    assert _by_chat(cache, old) == _by_chat(few_columns, old)
    assert after.hidden_rms == pytest.approx(wanted.hidden_rms, rel=1e-9)
    for name, info in after.shards.items():
        data = (cache / "shards" / f"{name}.parquet").read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (info.sha256, info.bytes)
    assert not list(cache.rglob("*.next")) + list(cache.rglob("*.tmp")) + list(cache.rglob("adding.json"))
    _verify(cache, tiny_target)
    assert "hidden.-4" in capsys.readouterr().out

    times = _times(cache)
    assert make(cache, **MANY) == after
    assert _times(cache) == times
    with pytest.raises(MismatchError, match="was cached with cache = "):
        make(cache, **FEW)

    # Shards are found again under the names that they were given when there were fewer columns.
    lost = sorted(after.shards)[1]
    (cache / "shards" / f"{lost}.parquet").unlink()
    assert make(cache, **MANY) == after
    changed = {name for name, time in _times(cache).items() if times.get(name) != time}
    assert changed == {f"shards/{lost}.json", f"shards/{lost}.parquet", "manifest.json"}
    assert _by_chat(cache) == _by_chat(many_columns)


@pytest.mark.soak
def test_quantised_columns_keep_their_channels_and_new_ones_are_found_as_at_first(
    make: Callable[..., Manifest], tiny_target: Path, tmp_path: Path
) -> None:
    codecs = {"kv_codec": "int4", "hidden_codec": "fp8", "compression": "zstd"}
    grown, whole = tmp_path / "grown", tmp_path / "whole"
    make(grown, **FEW, **codecs)
    before, rows = pq.read_table(grown / "channels.parquet").to_pylist(), _by_chat(grown)
    make(grown, **MANY, **codecs)
    make(whole, **MANY, **codecs)
    channels = {row["column"]: row for row in pq.read_table(grown / "channels.parquet").to_pylist()}
    assert [channels[row["column"]] for row in before] == before
    assert channels == {row["column"]: row for row in pq.read_table(whole / "channels.parquet").to_pylist()}
    grown_rows = _by_chat(grown)
    assert grown_rows == _by_chat(whole)
    assert all(grown_rows[uid].items() >= row.items() for uid, row in rows.items())
    _verify(grown, tiny_target)

    # Another codec for what is new is fine, for what is there it is another cache.
    make(grown, **(MANY | {"hidden_depths": (-1, -2, -4, -3)}), **codecs, column_codecs={"hidden.-3": "bfloat16"})
    assert read_manifest(CacheStore(str(grown))).columns["hidden.-3"].codec == "bfloat16"
    _verify(grown, tiny_target)
    with pytest.raises(MismatchError, match="was cached with cache = "):
        make(grown, **(MANY | {"hidden_depths": (-1, -2, -4, -3)}), **codecs)


def test_what_differs_in_anything_else_is_refused_and_nothing_is_touched(
    cache: Path, make: Callable[..., Manifest], other_target: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    times = _times(cache)
    for changes in ({"hidden_codec": "fp8"}, {"max_length": 100}, {"hidden_depths": (-1, -4)}, {"shard_mib": 2}):
        with pytest.raises(MismatchError, match="was cached with cache = "):
            make(cache, **(MANY | changes))
    with pytest.raises(MismatchError, match="was cached with target = "):
        _cache(cache, other_target, chats_file, **MANY)
    fewer = tmp_path / "chats.jsonl"
    fewer.write_text("".join(chats_file.read_text().splitlines(keepends=True)[:50]))
    with pytest.raises(MismatchError, match="was cached with chats = "):
        _cache(cache, tiny_target, fewer, **MANY)
    with pytest.raises(ConfigError, match=r"adding kv.00, hidden.-4 to .* takes about .* more, .*cache.max_bytes all"):
        make(cache, **MANY, max_bytes=sum(path.stat().st_size for path in cache.rglob("*.parquet")) + 10_000)
    assert _times(cache) == times


def test_plan_says_what_adding_columns_takes_and_writes_nothing(
    cache: Path, tiny_target: Path, chats_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from moray.activations.planning.plan_report import Workers, print_plan

    times, num_shards = _times(cache), len(read_manifest(CacheStore(str(cache))).shards)
    target, chats = TargetConfig(model=str(tiny_target)), ChatsConfig(path=str(chats_file))
    for changes, is_addition in ((MANY, True), (FEW, False), (MANY | {"max_length": 100}, False)):
        config = CacheConfig(**(SETTINGS | changes))
        print_plan(str(cache), target, chats, config, Workers(1, 1, need_gpu=False), Console(width=200))
        told = capsys.readouterr().out
        line = f"the cache that is there is kept and grows: adding kv.00, hidden.-4 to {num_shards} shards: "
        assert (line in told) is is_addition
        assert told.count("minutes") == 1
    assert _times(cache) == times


@pytest.mark.soak
def test_a_compacted_cache_grows_and_a_grown_one_is_compacted(
    cache: Path, many_columns: Path, make: Callable[..., Manifest], tiny_target: Path
) -> None:
    from moray.cluster.caching.compact import compact

    before, now = compact(str(cache), 2, 2)
    assert now < before
    joined = read_manifest(CacheStore(str(cache)))
    grown = make(cache, **MANY)
    assert _row_groups(grown) == _row_groups(joined)
    assert {name: info.made_of for name, info in grown.shards.items()} == {
        name: info.made_of for name, info in joined.shards.items()
    }
    assert _by_chat(cache) == _by_chat(many_columns)
    _verify(cache, tiny_target)
    assert compact(str(cache), 64, 2) == (now, 1)
    assert _by_chat(cache) == _by_chat(many_columns)
    _verify(cache, tiny_target)
    assert make(cache, **MANY) == read_manifest(CacheStore(str(cache)))


@pytest.mark.slow
def test_between_two_runs_the_cache_is_the_old_one_and_says_how_to_go_on(
    cache: Path,
    many_columns: Path,
    make: Callable[..., Manifest],
    tiny_target: Path,
    chats_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As kills leave it: some shards done, one whose file is in place but not its marker."""
    from read_back import stream_batches

    from moray.activations.capture.extend import ShardExtender
    from moray.activations.planning.adding import begin_addition
    from moray.activations.planning.cache_spec import CacheSpec
    from moray.activations.reading.epochs import plan_epoch
    from moray.cluster.caching.compact import compact
    from moray.targets.model import Target

    store, config = CacheStore(str(cache)), CacheConfig(**(SETTINGS | MANY))
    old = read_manifest(store)
    target = TargetConfig(model=str(tiny_target))
    plan = CacheSpec.of(target, ChatsConfig(path=str(chats_file)), config).plan()
    begin_addition(store, plan, ["kv.00", "hidden.-4"])
    extender = ShardExtender(Target.load(target), store, config)
    done, cut, *others = sorted(old.shards)
    extender.extend(done)
    marker = (cache / "shards" / f"{cut}.json").read_bytes()
    info = extender.extend(cut)
    (cache / "shards" / f"{cut}.json").write_bytes(marker)
    store.write_json(f"shards/{cut}.next", info.__dict__)
    (cache / "shards" / f"{others[0]}.next").write_text("{")
    times = _times(cache)

    needs = TapNeeds(kv_layers=(2,), hidden_depths=(-1, -2))
    epoch = plan_epoch(old.lengths, 384, 0, 0, 1)[0]
    batches = list(stream_batches(str(cache), read_manifest(store), epoch, needs))
    assert sum(int(batch.lengths.sum()) for batch in batches) == old.num_tokens
    (cache / "run.yaml").write_text(_run_yaml(tiny_target, chats_file, cache))
    with pytest.raises(DataError, match=r"columns kv.00, hidden.-4 are being added; complete that with .*max_length"):
        compact(str(cache), 2, 1)
    with pytest.raises(DataError, match="problems"):
        _verify(cache, tiny_target)
    told = capsys.readouterr().out
    assert "columns kv.00, hidden.-4 are being added" in told
    assert f"shards/{done}.parquet" not in told

    # The old command repairs the old columns, and leaves the added ones.
    assert make(cache, **FEW).columns == old.columns
    assert list(stored_columns(store, done)) == list(plan.columns)
    assert read_manifest(store).hidden_rms == old.hidden_rms
    new = make(cache, **MANY)
    assert f"adding kv.00, hidden.-4 to {len(others)} of {len(old.shards)} shards" in capsys.readouterr().out
    assert _row_groups(new) == _row_groups(old)
    assert _by_chat(cache) == _by_chat(many_columns)
    assert all(_times(cache)[f"shards/{name}.parquet"] == times[f"shards/{name}.parquet"] for name in (done, cut))
    assert not list(cache.rglob("*.next")) + list(cache.rglob("adding.json"))
    _verify(cache, tiny_target)


def _run_yaml(target: Path, chats: Path, output: Path) -> str:
    from moray.provenance import run_yaml
    from pipelines.cache_activations import CacheActivationsConfig

    values = {"target": {"model": str(target)}, "chats": {"path": str(chats)}, "cache": SETTINGS | FEW}
    return run_yaml(validate(CacheActivationsConfig, values | {"output": str(output)}))


@pytest.mark.soak
def test_a_drafter_without_its_columns_is_told_the_command_that_adds_them_and_then_trains(
    few_columns: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    from moray.cluster.training.configs import DistillConfig
    from moray.cluster.training.distill import distill
    from pipelines import cache_activations as pipeline

    output = shutil.copytree(few_columns, tmp_path / "a cache")
    (output / "run.yaml").write_text(_run_yaml(tiny_target, chats_file, output))
    block = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}
    blocks = ("layer_self_attention", "self_attention", "cross_attention")
    values = {
        "target": {"model": str(tiny_target)},
        "activations": str(output),
        "output": str(tmp_path / "moa"),
        "drafter": {"type": "moa", "target_layers": 1, **dict.fromkeys(blocks, block)},
        "optim": {"type": "muon", "lr": 0.02, "vector_lr": 0.003},
        "train": {"epochs": 1, "max_steps": 2, "batch_tokens": 512},
    }
    config = validate(DistillConfig, values)
    with pytest.raises(DataError, match=r"the cache has no column 'kv\.") as caught:
        distill(config)
    command = str(caught.value).partition(", run python -m pipelines.cache_activations ")[2]
    _, settings = load_command(pipeline.COMMANDS, shlex.split(command))
    assert settings.cache.kv_layers == (0, 1, 2), command
    assert settings.cache.max_length == SETTINGS["max_length"]
    pipeline.main(settings)
    assert (distill(config) / "drafter.safetensors").is_file()
    assert read_run_yaml(output)["config"]["cache"]["kv_layers"] == [0, 1, 2]
