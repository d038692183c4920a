"""What keeps a cache whole: damage is named and only that is redone; verify, compaction, figures."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moray.activations.format.manifest import read_manifest
from moray.activations.format.scan import scan
from moray.activations.format.schema import bytes_per_token
from moray.activations.format.store import CacheStore
from moray.activations.maintenance.compact import join, plan_compaction
from moray.activations.maintenance.configs import VerifyConfig
from moray.activations.maintenance.figures import cache_statistics, statistics_lines
from moray.activations.reading.epochs import plan_epoch
from moray.batch import TapNeeds
from moray.errors import DamagedError, DataError, MismatchError
from moray.targets.spec import TargetConfig

CACHE_SETTINGS: dict[str, Any] = {"max_length": 384, "batch_tokens": 1024, "shard_mib": 1, "chats_per_part": 12}

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def cache(tiny_cache: Path, tmp_path: Path) -> Path:
    """A copy of the complete cache, to be damaged."""
    return shutil.copytree(tiny_cache, tmp_path / "cache")


@pytest.fixture
def complete(cache: Path, tiny_target: Path, chats_file: Path) -> Callable[[], Any]:
    """Run the caching command's work on it again."""
    from moray.activations.format.schema import CacheConfig
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig
    from moray.data.ultrachat import ChatsConfig

    target, chats = TargetConfig(model=str(tiny_target)), ChatsConfig(path=str(chats_file))
    return lambda: cache_activations(str(cache), target, chats, CacheConfig(**CACHE_SETTINGS), CaptureConfig())


def _times(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def _rows(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    rows = [row for name in names for row in pq.read_table(folder / "shards" / f"{name}.parquet").to_pylist()]
    return sorted(rows, key=lambda row: row["uid"])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _verify(cache: Path, target: Path | None = None, **options: Any) -> None:
    from moray.cluster.caching.upkeep import VerifyCacheConfig
    from moray.cluster.caching.verify import verify_cache

    chosen = None if target is None else TargetConfig(model=str(target))
    verify_cache(VerifyCacheConfig(output=str(cache), target=chosen, verify=VerifyConfig(**options)))


def test_the_caching_command_redoes_what_is_damaged_and_says_so(
    cache: Path, complete: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = read_manifest(CacheStore(str(cache)))
    cut, gone, marked, *_ = sorted(first.shards)
    shards = cache / "shards"
    (shards / f"{cut}.parquet").write_bytes((shards / f"{cut}.parquet").read_bytes()[:-9])
    (shards / f"{gone}.parquet").unlink()
    marker = json.loads((shards / f"{marked}.json").read_text())
    (shards / f"{marked}.json").write_text(json.dumps(marker | {"tokens": marker["tokens"] + 1}))
    part = cache / "tokens" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:50])
    (cache / "plan.json").write_text("{")
    times = _times(cache)
    assert complete() == first
    printed = capsys.readouterr().out
    assert f"shard 'shards/{cut}.parquet' is damaged: it has" in printed
    assert f"shard 'shards/{gone}.parquet' is damaged: it is missing" in printed
    assert f"shard 'shards/{marked}.parquet' is damaged: its marker is damaged" in printed
    assert "part 'tokens/part-00001.parquet' is damaged: it has 50 bytes, noted are" in printed
    assert "plan.json' was damaged: written again from manifest.json" in printed
    after = _times(cache)
    redone = {f"shards/{name}.{kind}" for name in (cut, gone, marked) for kind in ("json", "parquet")}
    redone |= {"tokens/part-00001.json", "tokens/part-00001.parquet", "plan.json", "manifest.json"}
    assert {name for name, time in after.items() if times.get(name) != time} == redone
    _verify(cache)

    (cache / "manifest.json").write_text("{}")
    assert complete() == first
    assert "manifest.json' is damaged: it will be written again" in capsys.readouterr().out


def test_verify_names_a_flipped_byte_and_repair_has_only_that_redone(
    cache: Path, complete: Callable[[], Any], tiny_target: Path, chats_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moray.commands import load_command
    from moray.provenance import run_yaml
    from pipelines import cache_activations as pipeline

    first = complete()
    config = pipeline.CONFIG.model_validate_json(
        json.dumps({"target": {"model": str(tiny_target)}, "chats": {"path": str(chats_file)}, "output": str(cache)})
    )
    (cache / "run.yaml").write_text(run_yaml(config))
    name = sorted(first.shards)[1]
    _flip(cache / "shards" / f"{name}.parquet")
    _flip(cache / "tokens" / "part-00000.parquet")
    assert complete() == first, "sizes alone do not show it"
    capsys.readouterr()
    with pytest.raises(DamagedError, match=r"has 2 problems; add verify\.repair=true"):
        _verify(cache)
    printed = capsys.readouterr().out
    assert f"shard 'shards/{name}.parquet': its content is not what was written (sha256)" in printed
    assert "part 'tokens/part-00000.parquet': its content" in printed
    times = _times(cache)
    with pytest.raises(DamagedError, match="2 damaged files removed; to make them again run python -m") as caught:
        _verify(cache, repair=True)
    words = str(caught.value).partition("pipelines.cache_activations ")[2].split()
    assert load_command(pipeline.COMMANDS, words)[1] == config
    assert complete() == first
    changed = {path for path, time in _times(cache).items() if times.get(path) != time}
    assert changed == {
        f"shards/{name}.json", f"shards/{name}.parquet", "tokens/part-00000.json", "tokens/part-00000.parquet",
        "manifest.json",
    }  # fmt: skip
    _verify(cache, sample_chats=2)


def test_a_sample_is_compared_with_the_target_itself(
    tiny_cache: Path, tiny_target: Path, other_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moray.activations.maintenance.recheck import recheck
    from moray.targets.model import Target

    store = CacheStore(str(tiny_cache))
    manifest = read_manifest(store)
    target = Target.load(TargetConfig(model=str(tiny_target)))
    errors = recheck(store, manifest, target, 4, 0)
    assert set(errors) == set(manifest.columns)
    assert all(1e-5 < error.relative_rms < 4e-3 for error in errors.values()), "bfloat16 rounds, and nothing else does"
    with pytest.raises(DataError, match=r"kv.00.* are not what the target gives now"):
        _verify(tiny_cache, tiny_target, sample_chats=2, max_error=1e-6)
    assert "more than 1e-06" in capsys.readouterr().out
    target.model.model.layers[1].self_attn.k_proj.weight.mul_(1.2)
    changed = recheck(store, manifest, target, 4, 0)
    assert changed["kv.00"].relative_rms < 4e-3
    assert changed["kv.01"].relative_rms > 0.05
    with pytest.raises(MismatchError, match="was cached from a target with fingerprint"):
        _verify(tiny_cache, other_target, sample_chats=2)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int4", *(pytest.param(name, marks=pytest.mark.soak) for name in ("fp8", "int8"))])
def test_a_quantised_cache_is_compared_through_its_channels_and_they_are_verified(
    codec: str, tiny_target: Path, chats_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tiny_caches import CACHE_SETTINGS

    from moray.activations.format.schema import CacheConfig
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig
    from moray.data.ultrachat import ChatsConfig

    settings = CacheConfig(**(CACHE_SETTINGS | {"kv_codec": codec, "hidden_codec": codec}))
    target, chats = TargetConfig(model=str(tiny_target)), ChatsConfig(path=str(chats_file))
    cache_activations(str(tmp_path), target, chats, settings, CaptureConfig())
    _verify(tmp_path, tiny_target, sample_chats=2)
    other = pq.read_table(tmp_path / "channels.parquet")
    columns = other.column_names
    doubled = [[[2 * value for value in row] for row in other["scale"].to_pylist()]]
    scale = pa.chunked_array(doubled, other.schema.field("scale").type)
    pq.write_table(other.set_column(columns.index("scale"), "scale", scale), tmp_path / "channels.parquet")
    with pytest.raises(DataError, match="has 1 problems"):
        _verify(tmp_path)
    assert "channels.parquet is not the one that shards were written with" in capsys.readouterr().out


@pytest.mark.slow
def test_compaction_keeps_every_row_goes_on_after_a_kill_and_is_redone_alone(
    cache: Path, complete: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from read_back import stream_batches

    from moray.cluster.caching.compact import compact

    store = CacheStore(str(cache))
    old = read_manifest(store)
    wanted = _rows(cache, list(old.shards))
    mib = 2
    groups = plan_compaction(old.shards.values(), bytes_per_token(old.columns), mib)
    assert len(groups) >= 2
    # As a kill after the first joined shard leaves it: committed, the old ones and the old manifest still there.
    first = join(store, groups[0], "none")
    time = (cache / "shards" / f"{first.name}.parquet").stat().st_mtime_ns
    counting = scan(store).counting.values()
    assert Counter(name for info in counting for name in info.planned) == Counter(list(old.shards))
    assert set(scan(store).superseded) == {info.name for info in groups[0]}
    plan = plan_epoch(old.lengths, 384, 0, 0, 1)[0].before(3)
    assert len(list(stream_batches(str(cache), old, plan, TapNeeds((0,), (-1,))))) == 3
    _verify(cache)

    assert compact(str(cache), mib, 2) == (len(old.shards), len(old.shards) - sum(len(g) - 1 for g in groups))
    new = read_manifest(store)
    assert (cache / "shards" / f"{first.name}.parquet").stat().st_mtime_ns == time
    assert set(store.names("shards", "")) == {f"{name}.{kind}" for name in new.shards for kind in ("json", "parquet")}
    assert _rows(cache, list(new.shards)) == wanted
    assert new.num_tokens == old.num_tokens
    assert new.hidden_rms == pytest.approx(old.hidden_rms)
    assert sorted(g for groups in new.lengths.values() for g in groups) == sorted(
        g for groups in old.lengths.values() for g in groups
    )
    _verify(cache, sample_chats=0)
    epoch = plan_epoch(new.lengths, 384, 0, 0, 1)[0]
    tokens = sum(int(batch.lengths.sum()) for batch in stream_batches(str(cache), new, epoch, TapNeeds((0,), (-1,))))
    assert tokens == old.num_tokens

    times = _times(cache)
    assert compact(str(cache), mib, 2) == (len(new.shards), len(new.shards))
    assert complete() == new
    assert _times(cache) == times

    (cache / "shards" / f"{first.name}.parquet").unlink()
    with pytest.raises(DamagedError, match=f"damaged shards \\({first.name}"):
        compact(str(cache), mib, 2)
    again = complete()
    assert set(again.shards) == (set(new.shards) - {first.name}) | set(first.made_of)
    assert _rows(cache, list(again.shards)) == wanted
    kept = {f"shards/{name}.parquet" for name in new.shards if name != first.name}
    assert all(_times(cache)[name] == times[name] for name in kept)


def test_figures_are_the_caches(tiny_cache: Path) -> None:
    store = CacheStore(str(tiny_cache))
    manifest = read_manifest(store)
    figures = cache_statistics(store, manifest, batch_tokens=1024)
    rows = _rows(tiny_cache, list(manifest.shards))
    lengths = [row["num_tokens"] for row in rows]
    assert figures["chats"] == 60
    assert figures["tokens"] == sum(lengths)
    assert figures["response_tokens"] == sum(sum(row["response_mask"]) for row in rows)
    assert sum(count for _, _, count in figures["lengths"]["histogram"]) == 60
    for first, last, count in figures["lengths"]["histogram"]:
        assert count == sum(first <= length <= last for length in lengths)
    assert figures["bytes_per_token"]["columns"]["kv.00"] == 2 * 2 * 16 * 2
    assert figures["bytes_per_token"]["stored"] == pytest.approx(figures["bytes"] / sum(lengths))
    groups = [group for shard in manifest.lengths.values() for group in shard]
    padded = sum(max(group) * len(group) for group in groups)
    assert figures["capture_padding"] == pytest.approx(1 - sum(lengths) / padded)
    assert 0 <= figures["epoch"]["padding"] < 0.2
    assert figures["hidden_rms"].keys() == {"-1", "-2", "-3"}
    assert json.loads(json.dumps(figures)) == figures
    assert "60 in" in statistics_lines(figures)[0]
