"""Plan before write: figures that come true, refusals that say what would fit, and file systems without room."""

import errno
import json
import random
from pathlib import Path

import pytest
from rich.console import Console
from tiny_targets import save_chat_target

from moray.activations.format.disk_space import DiskSpace, free_bytes, is_full, size_text, storage_full_errors
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.planning.measure import measure_disk_space
from moray.activations.planning.plan import (
    Workload,
    check_fits,
    codec_choices,
    count_work,
    fewer_chats,
    forecast,
    subset_choices,
)
from moray.activations.planning.plan_report import Workers, print_plan
from moray.activations.planning.sample import NUM_SAMPLES, project, sample_chats
from moray.activations.planning.shards import plan_shards
from moray.data.ultrachat import ChatsConfig, plan_chunks
from moray.errors import ConfigError, StorageFullError
from moray.targets.spec import TargetConfig, TargetSpec
from moray.text import ChatTokenizer

SPEC = TargetSpec(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_positions=8192,
    rope_theta=500000.0,
    norm_eps=1e-5,
    fingerprint="",
)
ULTRACHAT = Workload(rows=207_865, chats=207_000, tokens=240_000_000, padded_tokens=250_000_000, row_groups=15_000)
CACHE = CacheConfig(hidden_depths=(-1,), shard_mib=512)
TB = 10**12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths, sorted by length, every tenth without an answer."""
    rng = random.Random(0)
    lengths = sorted(int(rng.lognormvariate(4, 0.7)) for _ in range(3000))
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for number, length in enumerate(lengths):
            messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "a" * length}]
            file.write(json.dumps({"messages": messages[: 1 if number % 10 == 9 else 2]}) + "\n")
    return path


def test_the_forecast_is_the_design_s() -> None:
    plan = forecast(SPEC, CACHE, ULTRACHAT)
    assert plan.total == pytest.approx(33.4 * TB, rel=0.01)
    assert plan.bytes["keys and values"] == pytest.approx(31.5 * TB, rel=0.01)
    assert plan.shards == pytest.approx(plan.total / 2**29, rel=0.01)
    small = forecast(SPEC, CacheConfig(hidden_depths=(-1,), kv_codec="int4", hidden_codec="fp8"), ULTRACHAT)
    assert small.total == pytest.approx(8.9 * TB, rel=0.02)
    assert ULTRACHAT.padding == pytest.approx(0.04)


def test_hours_are_for_what_is_left_and_shared_by_all_targets() -> None:
    from dataclasses import replace

    plan = replace(forecast(SPEC, CACHE, ULTRACHAT), tokens_per_second=10_000.0)
    whole = 240e6 / 10_000 / 3600
    assert plan.hours(1) == pytest.approx(whole)
    assert plan.hours(4) == pytest.approx(whole / 4)
    assert plan.hours(2, written=plan.total // 4) == pytest.approx(whole * 0.75 / 2)
    assert "about 1.7 hours for what is left, at 10,000 tokens/s of each of 4 targets" in plan.lines(DiskSpace(None), 4)
    assert replace(plan, tokens_per_second=None).hours(1) is None
    assert len(replace(plan, tokens_per_second=None).lines(DiskSpace(None), 4)) == 3


def test_too_little_space_is_refused_with_what_would_fit() -> None:
    plan = forecast(SPEC, CACHE, ULTRACHAT)
    check_fits(SPEC, CACHE, plan, DiskSpace(free=34 * TB), "/data")
    check_fits(SPEC, CACHE, plan, DiskSpace(free=None), "s3://bucket/cache")
    with pytest.raises(ConfigError) as caught:
        check_fits(SPEC, CACHE, plan, DiskSpace(free=17 * TB, reserve=1 << 30), "/data")
    message = str(caught.value)
    assert message.startswith("the cache takes 30.4 TiB, but '/data' has 15.5 TiB free, of which 1.0 GiB stay free")
    assert "cache.kv_codec=fp8 cache.hidden_codec=fp8 (15.2 TiB)" in message
    assert "cache.kv_codec=fp8 cache.hidden_codec=bfloat16" not in message  # 16.2 TiB
    assert "'cache.kv_layers=[]' for EAGLE, Medusa, independent (1.8 TiB)" in message
    assert "; chats.max_chats=1" in message
    assert "\n" not in message


def test_every_advice_fits_when_it_is_followed() -> None:
    disk = DiskSpace(free=40 * TB, max_bytes=17 * TB)
    plan = forecast(SPEC, CACHE, ULTRACHAT)
    with pytest.raises(ConfigError, match=r"cache.max_bytes allows 15.5 TiB: raise it; what fits: cache.kv_codec=fp8"):
        check_fits(SPEC, CACHE, plan, disk, "/data")
    fewer = fewer_chats(plan, disk)
    assert fewer is not None
    rows = int(fewer.overrides.removeprefix("chats.max_chats="))
    share = rows / ULTRACHAT.rows
    work = Workload(rows, int(207_000 * share), int(240e6 * share), int(250e6 * share), int(15_000 * share))
    assert disk.fits(forecast(SPEC, CACHE, work).total)
    assert not disk.fits(int(forecast(SPEC, CACHE, work).total * 1.05))
    assert fewer_chats(plan, DiskSpace(free=100)) is None


def test_what_is_written_counts() -> None:
    plan = forecast(SPEC, CACHE, ULTRACHAT)
    check_fits(SPEC, CACHE, plan, DiskSpace(free=14 * TB, written=20 * TB), "/data")
    check_fits(SPEC, CACHE, plan, DiskSpace(free=14 * TB, written=20 * TB, max_bytes=34 * TB), "/data")
    with pytest.raises(ConfigError, match=r"of which 18.2 TiB are written, but .* 1.3 TiB too little.*another output"):
        check_fits(SPEC, CACHE, plan, DiskSpace(free=12 * TB, written=20 * TB), "/data")
    with pytest.raises(ConfigError, match=r"cache.max_bytes allows 27.3 TiB"):
        check_fits(SPEC, CACHE, plan, DiskSpace(free=14 * TB, written=20 * TB, max_bytes=30 * TB), "/data")


def test_a_projection_is_refused_only_where_even_its_lower_end_does_not_fit() -> None:
    from dataclasses import replace

    work = replace(ULTRACHAT, error=0.1)
    check_fits(SPEC, CACHE, forecast(SPEC, CACHE, work), DiskSpace(free=31 * TB), "/data")
    with pytest.raises(ConfigError, match=r"^the cache takes about 30.4 TiB"):
        check_fits(SPEC, CACHE, forecast(SPEC, CACHE, work), DiskSpace(free=29 * TB), "/data")


def test_choices_leave_alone_what_was_chosen() -> None:
    assert len(codec_choices(SPEC, CACHE, ULTRACHAT)) == 16
    hidden_alone = CACHE.model_copy(update={"kv_layers": ()})
    assert [c.overrides for c in codec_choices(SPEC, hidden_alone, ULTRACHAT)] == [
        f"cache.hidden_codec={name}" for name in ("bfloat16", "fp8", "int8", "int4")
    ]
    own = CACHE.model_copy(update={"column_codecs": {"hidden.-1": "bfloat16"}})
    assert len(codec_choices(SPEC, own, ULTRACHAT)) == 4
    own = CACHE.model_copy(update={"column_codecs": {"kv.00": "bfloat16"}})
    assert subset_choices(SPEC, own, ULTRACHAT) == []  # all leave kv.00 out
    assert [c.what_for for c in subset_choices(SPEC, CACHE, ULTRACHAT)] == ["GLIDE", "EAGLE, Medusa, independent"]
    assert subset_choices(SPEC, hidden_alone, ULTRACHAT) == []


def test_a_sample_of_sorted_chats_projects_them_all(target: Path, chats: Path) -> None:
    tokenizer = ChatTokenizer.load(str(target))
    cache = CacheConfig(chats_per_part=200, batch_tokens=4096)
    chunks = plan_chunks(ChatsConfig(path=str(chats)), cache.chats_per_part)
    sample = sample_chats(chunks, tokenizer, 384)
    assert NUM_SAMPLES <= sample.rows < NUM_SAMPLES + 16
    work = project(sample, 3000, cache)
    whole = [
        len(tokenizer.encode_chat(row["messages"], 384).tokens)
        for row in map(json.loads, chats.read_text().splitlines())
        if len(row["messages"]) == 2
    ]
    assert work.chats == pytest.approx(len(whole), rel=0.03)
    assert work.tokens == pytest.approx(sum(whole), rel=0.03)
    assert 0.03 < work.error < 0.1
    assert 0.0 < work.padding < 0.2
    few = plan_chunks(ChatsConfig(path=str(chats), max_chats=50), cache.chats_per_part)
    exact = project(sample_chats(few, tokenizer, 384), 50, cache)
    assert (exact.rows, exact.chats, exact.error) == (50, 45, 0.0)


def test_counted_work_is_that_of_the_planned_batches() -> None:
    lengths = {"part-00000": [10, 500, 20, 90], "part-00001": [7]}
    shards = [
        plan for part, some in lengths.items() for plan in plan_shards(part, some, CacheConfig(batch_tokens=100), 1)
    ]
    work = count_work(shards, lengths, rows=9)
    assert work == Workload(rows=9, chats=5, tokens=627, padded_tokens=500 + 90 + 40 + 7, row_groups=4)


def test_plan_needs_no_weights_and_writes_nothing(target: Path, chats: Path, tmp_path: Path) -> None:
    import shutil

    bare = Path(shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")))
    printed = {}
    for folder in (bare, target):
        console = Console(record=True, width=160, file=(tmp_path / "console").open("w"))
        output = tmp_path / "output"
        cache = CacheConfig(max_length=384, chats_per_part=200, batch_tokens=1024, max_bytes=10**6)
        print_plan(
            str(output),
            TargetConfig(model=str(folder)),
            ChatsConfig(path=str(chats)),
            cache,
            Workers(num_targets=2, threads=1, need_gpu=False),
            console,
        )
        assert not output.exists()
        printed[folder] = console.export_text()
    text = printed[bare]
    assert "from 405 of 3,000 rows" in text
    assert "tokens/s" not in text
    assert "tokens/s of each of 2 targets" in printed[target]
    assert "cache.kv_codec=int4 cache.hidden_codec=fp8" in text
    assert "'cache.kv_layers=[]' 'cache.hidden_depths=[-1]' (EAGLE, Medusa, independent)" in text
    assert "it does not fit; as it is, chats.max_chats=" in text


# --- Room ---


def test_room_is_the_tighter_of_space_and_quota(tmp_path: Path) -> None:
    assert DiskSpace(None).left is None
    assert DiskSpace(100, reserve=30).left == 70
    assert DiskSpace(100, reserve=30, max_bytes=60, written=10).left == 50
    assert DiskSpace(10, reserve=30).left == 0
    free, reserve = free_bytes(tmp_path / "not" / "yet" / "there")
    assert free > reserve > 0
    store = CacheStore(str(tmp_path / "cache"))
    assert measure_disk_space(store, CacheConfig(max_bytes=5)).max_bytes == 5
    (tmp_path / "cache" / "tokens").mkdir(parents=True)
    (tmp_path / "cache" / "tokens" / "part-00000.parquet").write_bytes(b"12345")
    assert measure_disk_space(store, CacheConfig()).written == 5


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("When completing multiple part upload: AWS Error UNKNOWN (HTTP status 507): XMinioStorageFull"),
        OSError("Unable to parse ExceptionName: QuotaExceeded Message: Bucket quota exceeded"),
    ],
)
def test_full_storage_is_told_as_such(error: OSError) -> None:
    assert is_full(error)
    with (
        pytest.raises(StorageFullError, match=r"^'x/y' cannot be written: no room is left \("),
        storage_full_errors("x/y"),
    ):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(OSError, match="denied"), storage_full_errors("x"):
        raise OSError(errno.EACCES, "denied")
    assert not is_full(OSError("AWS Error ACCESS_DENIED"))


def test_sizes_read_well() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 250 * 2**20, 5 * 2**40)] == [
        "0 bytes", "1,023 bytes", "1.5 KiB", "250 MiB", "5.0 TiB",
    ]  # fmt: skip
