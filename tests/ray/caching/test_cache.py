"""The activation cache on Ray Data: complete, exact, resumable, picky; and the stream of batches read from it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
import torch
from replica_killer import ReplicaKiller

from moray.activations.capture.attempts import MAX_ATTEMPTS
from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import Manifest, read_manifest
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import collate, needed_columns
from moray.activations.reading.epochs import EpochPlan, Window, plan_epoch
from moray.batch import TapNeeds, TrainBatch
from moray.config import validate
from moray.data.ultrachat import ChatsConfig
from moray.errors import ConfigError, DataError, MismatchError
from moray.provenance import read_run_yaml
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

SETTINGS: dict[str, Any] = {"max_length": 384, "batch_tokens": 1024, "shard_mib": 1, "chats_per_part": 12}
NEEDS = TapNeeds(kv_layers=(0, 2), hidden_depths=(-1, -2))

pytestmark = pytest.mark.usefixtures("ray_session")


def _cache(
    output: Path,
    target: Path,
    chats: Path,
    max_bad_rows: int = 100,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **changes: Any,
) -> Manifest:
    from moray.cluster.caching.capture import cache_activations
    from moray.cluster.caching.configs import CaptureConfig

    return cache_activations(
        str(output),
        TargetConfig(model=str(target), dtype=dtype),
        ChatsConfig(path=str(chats), max_bad_rows=max_bad_rows),
        CacheConfig(**(SETTINGS | changes)),
        CaptureConfig(),
    )


def _all_rows(folder: Path) -> list[dict[str, Any]]:
    names = sorted(path.stem for path in (folder / "shards").glob("*.json"))
    return [row for name in names for row in pq.read_table(folder / "shards" / f"{name}.parquet").to_pylist()]


def test_rows_that_a_task_yields_arrive_while_it_runs(tmp_path: Path) -> None:
    """The task ends only when its first rows have arrived, or after a minute, when its last row is -1. Ray Data's
    iterator fetches one row ahead."""
    from moray.cluster.caching.rows import Batch, TokensRow, batch_of, dataset_of, rows_from

    arrived = tmp_path / "arrived"

    def count(batch: Batch) -> Iterator[Batch]:
        yield batch_of([TokensRow(1)])
        yield batch_of([TokensRow(2)])
        deadline = time.monotonic() + 60
        while not arrived.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield batch_of([TokensRow(3 if arrived.exists() else -1)])

    tokens = []
    for row in rows_from(dataset_of([TokensRow(0)]).map_batches(count, batch_size=1), TokensRow):
        tokens.append(row.tokens)
        arrived.touch()
    assert tokens == [1, 2, 3]


def test_cache_holds_every_chat_once_and_its_totals_are_right(
    tiny_cache: Path, tiny_target: Path, chats_file: Path
) -> None:
    tokenizer = ChatTokenizer.load(str(tiny_target))
    expected = {}
    for number, line in enumerate(chats_file.read_text().splitlines(), start=1):
        row = json.loads(line)
        chat = tokenizer.encode_chat(row["messages"], SETTINGS["max_length"])
        expected[f"chats.jsonl#{number}#{row['prompt_id']}"] = (chat.tokens.tolist(), chat.response_mask.tolist())
    rows = _all_rows(tiny_cache)
    assert len(rows) == 60
    assert {row["uid"]: (row["tokens"], row["response_mask"]) for row in rows} == expected

    manifest = json.loads((tiny_cache / "manifest.json").read_text())
    files = sorted((tiny_cache / "shards").glob("*.parquet"))
    assert manifest["totals"] == {
        "shards": len(files),
        "rows": 60,
        "tokens": sum(len(tokens) for tokens, _ in expected.values()),
        "bytes": sum(file.stat().st_size for file in files),
    }
    assert len(files) >= 5
    assert manifest["chats"] == {"chats": 60, "dropped": 0, "bad": 0}
    final = torch.cat(
        [torch.frombuffer(bytearray(row["hidden.-1"]), dtype=torch.bfloat16).float().view(-1, 64) for row in rows]
    )
    assert manifest["hidden_rms"]["hidden.-1"] == pytest.approx(float(final.pow(2).mean().sqrt()), rel=1e-3)


def test_second_run_touches_nothing_and_a_removed_shard_is_made_again(
    tiny_cache: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    import shutil

    output = shutil.copytree(tiny_cache, tmp_path / "cache")
    chats = shutil.copy(chats_file, tmp_path / "chats.jsonl")
    store = CacheStore(str(output))
    for name in ("plan.json", "manifest.json"):  # as if cached from this file, which may be changed below
        text = json.dumps(store.read_json(name)).replace(str(chats_file), str(chats))
        store.write_json(name, json.loads(text))
    first = read_manifest(CacheStore(str(output)))
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    assert _cache(output, tiny_target, chats) == first
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == times

    name = next(iter(first.shards))
    (output / "shards" / f"{name}.json").unlink()
    (output / "shards" / f"{name}.parquet").unlink()
    assert _cache(output, tiny_target, chats) == first
    changed = {path.name for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed == {f"{name}.json", f"{name}.parquet", "manifest.json"}

    with pytest.raises(MismatchError, match=r"cached with cache = .*\"max_length\": 384.* now it is .*100"):
        _cache(output, tiny_target, chats, max_length=100)
    with pytest.raises(MismatchError, match=r"cached with dtype = \"float32\", now it is \"bfloat16\""):
        _cache(output, tiny_target, chats, dtype="bfloat16")
    with chats.open("a") as file:
        file.write("\n")
    with pytest.raises(MismatchError, match=r"cached with files = .*chats.jsonl"):
        _cache(output, tiny_target, chats)


def test_a_run_that_makes_nothing_leaves_the_record_of_the_one_that_did(
    tiny_cache: Path, tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    import shutil

    from pipelines.cache_activations import CacheActivationsConfig, main

    output = shutil.copytree(tiny_cache, tmp_path / "cache")
    values = {"target": {"model": str(tiny_target)}, "chats": {"path": str(chats_file)}, "cache": SETTINGS}
    config = validate(CacheActivationsConfig, values | {"output": str(output)})
    main(config)
    assert read_run_yaml(output)["config"]["cache"]["max_length"] == 384
    record = (output / "run.yaml").read_text() + "# as it was\n"
    (output / "run.yaml").write_text(record)
    main(config)
    assert (output / "run.yaml").read_text() == record
    (output / "manifest.json").unlink()
    main(config)
    assert (output / "run.yaml").read_text() != record


def test_bad_rows_are_counted_reported_and_limited(
    tiny_target: Path, chats_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = chats_file.read_text().splitlines()[:8]
    lines[2] = '{"messages": [{"role": "user"'
    lines[5] = json.dumps({"messages": [{"role": "dog", "content": "wuff"}]})
    lines[7] = json.dumps({"messages": [{"role": "user", "content": "nobody answers"}]})
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(DataError, match=r"bad rows, chats.max_bad_rows allows 1; the first: .*chats.jsonl.*3"):
        _cache(tmp_path / "cache", tiny_target, chats, max_bad_rows=1)
    assert not (tmp_path / "cache" / "manifest.json").exists()
    capsys.readouterr()

    # Allowing more is no other cache: the parts stay.
    manifest = _cache(tmp_path / "cache", tiny_target, chats, max_bad_rows=3)
    counts = json.loads((tmp_path / "cache" / "manifest.json").read_text())["chats"]
    assert counts["chats"] == 5
    assert counts["bad"] + counts["dropped"] == 3
    assert sum(shard.rows for shard in manifest.shards.values()) == 5
    printed = capsys.readouterr().out
    assert printed.count("bad row: ") == counts["bad"] >= 2
    assert "5 chats kept" in printed


@pytest.mark.slow
def test_values_that_are_not_finite_stop_the_job_with_our_own_one_line_error(
    tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_target, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][0] = 3e38  # finite, as a target's weights must be
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"^column 'kv.01' of chat 'chats.jsonl#\d+#chat-\d+' is not finite") as caught:
        _cache(tmp_path / "cache", broken, chats_file)
    assert type(caught.value) is DataError
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache" / "shards").glob("*"))


def test_an_error_in_an_actors_constructor_is_our_own_one_line_error_too(
    tiny_target: Path, chats_file: Path, tmp_path: Path
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_target, broken)
    (broken / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ConfigError, match=r"^target.model '.*broken' cannot be loaded") as caught:
        _cache(tmp_path / "cache", broken, chats_file)
    assert type(caught.value) is ConfigError


@pytest.mark.soak
def test_a_killed_actor_is_replaced_and_the_cache_is_complete(
    tiny_cache: Path,
    tiny_target: Path,
    chats_file: Path,
    tmp_path: Path,
    ray_processes: Callable[[str], dict[int, str]],
) -> None:
    output = tmp_path / "cache"
    killed: list[int] = []
    with _meanwhile(lambda: _kill_shard_actor(output, ray_processes, killed)):
        manifest = _cache(output, tiny_target, chats_file, chats_per_part=3)
    assert killed, "no actor could be killed while it worked"
    assert manifest.num_tokens == read_manifest(CacheStore(str(tiny_cache))).num_tokens
    rows, wanted = _all_rows(output), _all_rows(tiny_cache)
    assert sorted(row["uid"] for row in rows) == sorted(row["uid"] for row in wanted)
    tokens = {row["uid"]: row["tokens"] for row in wanted}
    assert all(row["tokens"] == tokens[row["uid"]] for row in rows)
    assert not list(output.rglob("*.tmp"))


@pytest.mark.slow
def test_a_shard_over_which_replicas_die_is_named_and_the_same_command_goes_on(
    ray_session: None,
    tiny_target: Path,
    write_chats: Callable[[Path, int], Path],
    tmp_path: Path,
    ray_processes: Callable[[str], dict[int, str]],
    kill: Callable[[int], None],
) -> None:
    chats = write_chats(tmp_path / "many.jsonl", 400)
    output = tmp_path / "cache"
    attempts = output / "shards" / "00001-00000.attempts"
    settings = {"chats_per_part": 200, "batch_tokens": 384, "shard_mib": 64}
    with (
        ReplicaKiller(attempts, MAX_ATTEMPTS, lambda: ray_processes("_ShardActor"), kill) as killer,
        pytest.raises(
            DataError, match=rf"{MAX_ATTEMPTS} target replicas died over shard '00001-00000' of .*num_targets"
        ),
    ):
        _cache(output, tiny_target, chats, **settings)
    assert len(killer.killed) == MAX_ATTEMPTS
    assert not (output / "manifest.json").exists()
    assert len(_cache(output, tiny_target, chats, **settings).shards) == 2
    assert not list(output.rglob("*.attempts"))


def _kill_shard_actor(output: Path, ray_processes: Callable[[str], dict[int, str]], killed: list[int]) -> None:
    import os
    import signal

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if list((output / "shards").glob("*.json")):
            for pid in ray_processes("_ShardActor"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
        time.sleep(0.002)


@contextmanager
def _meanwhile(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(timeout=130)


def _tensors(batch: TrainBatch) -> list[torch.Tensor]:
    assert batch.taps.kv is not None
    return [batch.tokens, batch.response_mask, batch.lengths, batch.taps.kv, *batch.taps.hidden.values()]


def _same(one: TrainBatch, two: TrainBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_tensors(one), _tensors(two), strict=True))


def _expected(store: CacheStore, manifest: Manifest, windows: list[Window]) -> Iterator[TrainBatch]:
    """The plan's batches, read row by row with nothing but pyarrow."""
    columns = needed_columns(NEEDS, manifest.columns)
    import pyarrow as pa

    for window in windows:
        groups = [store.read_row_groups(shard, [group], columns) for shard, group in window.row_groups]
        table = pa.concat_tables(groups)
        for rows in window.batches:
            yield collate(table.take(rows), NEEDS, TapDecoder(manifest.columns))


def _stream(uri: str, manifest: Manifest, plan: EpochPlan, needs: TapNeeds) -> Iterator[TrainBatch]:
    from moray.cluster.training.stream import Reader, stream_updates

    for (data_shard,) in stream_updates(Reader(uri, manifest, needs), {0: plan}):
        yield data_shard.whole("cpu")


def test_lanes_come_together_and_one_by_one_alike(tiny_cache: Path) -> None:
    """One worker with three data shards sees what three workers with one data shard see, also from the middle on."""
    from moray.cluster.training.stream import Reader, stream_updates

    manifest = read_manifest(CacheStore(str(tiny_cache)))
    plans = plan_epoch(manifest.lengths, 384, seed=3, epoch=0, num_data_shards=3, window_tokens=1500)
    assert all(len(plan.windows) >= 3 for plan in plans)
    alone = [list(_stream(str(tiny_cache), manifest, plan, NEEDS)) for plan in plans]
    reader = Reader(str(tiny_cache), manifest, NEEDS)
    for done in (0, 4):
        together = list(stream_updates(reader, {data_shard: plan.after(done) for data_shard, plan in enumerate(plans)}))
        assert len(together) == plans[0].num_steps - done
        for step, data_shards in enumerate(together, start=done):
            assert [batch.data_shard for batch in data_shards] == [0, 1, 2]
            assert all(_same(batch.whole("cpu"), alone[batch.data_shard][step]) for batch in data_shards)
            assert all(len(batch.uids) == batch.text.tokens.shape[0] for batch in data_shards)
    uids = [
        uid
        for data_shards in stream_updates(reader, dict(enumerate(plans)))
        for batch in data_shards
        for uid in batch.uids
    ]
    assert len(uids) == len(set(uids)) == 60


def test_stream_yields_exactly_the_plan_and_resumes_in_its_middle(tiny_cache: Path) -> None:
    store = CacheStore(str(tiny_cache))
    manifest = read_manifest(store)
    plan = plan_epoch(manifest.lengths, batch_tokens=384, seed=3, epoch=1, num_data_shards=1)[0]
    assert plan.num_steps >= 20
    assert len(plan.windows) >= 2
    whole = list(_stream(str(tiny_cache), manifest, plan, NEEDS))
    expected = list(_expected(store, manifest, plan.windows))
    assert len(whole) == len(expected) == plan.num_steps
    assert all(_same(got, wanted) for got, wanted in zip(whole, expected, strict=True))
    assert whole[0].taps.kv is not None
    assert whole[0].taps.kv.shape[2:] == (2, 64)
    assert set(whole[0].taps.hidden) == {-1, -2}

    middle = len(plan.windows[0].batches) // 2 + 1
    tail = list(_stream(str(tiny_cache), manifest, plan.after(middle), NEEDS))
    assert len(tail) == plan.num_steps - middle
    assert all(_same(got, wanted) for got, wanted in zip(tail, whole[middle:], strict=True))
    head = list(_stream(str(tiny_cache), manifest, plan.before(middle), NEEDS))
    assert len(head) == middle
    assert list(_stream(str(tiny_cache), manifest, plan.after(plan.num_steps), NEEDS)) == []


def test_stream_reads_the_needed_columns_only(tiny_cache: Path, tmp_path: Path) -> None:
    """A cache whose other columns were cut out of its files serves the same batches."""
    import shutil

    pruned = tmp_path / "pruned"
    shutil.copytree(tiny_cache, pruned)
    manifest = read_manifest(CacheStore(str(tiny_cache)))
    columns = needed_columns(NEEDS, manifest.columns)
    for path in (pruned / "shards").glob("*.parquet"):
        source = pq.ParquetFile(path)
        with pq.ParquetWriter(path.with_suffix(".new"), source.read(columns=columns).schema) as writer:
            for group in range(source.num_row_groups):
                table = source.read_row_group(group, columns=columns)
                writer.write_table(table, row_group_size=table.num_rows)
        path.with_suffix(".new").replace(path)
    plan = plan_epoch(manifest.lengths, 384, 0, 0, 1)[0].before(3)
    for got, wanted in zip(
        _stream(str(pruned), manifest, plan, NEEDS),
        _stream(str(tiny_cache), manifest, plan, NEEDS),
        strict=True,
    ):
        assert _same(got, wanted)
    whole = TapNeeds(kv_layers=(1,))
    with pytest.raises(Exception, match=r"kv\.01"):
        list(_stream(str(pruned), manifest, plan, whole))


def test_a_byte_that_has_flipped_in_a_shard_is_noticed(tiny_cache: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_cache, tmp_path / "cache")
    store = CacheStore(str(tmp_path / "cache"))
    manifest = read_manifest(store)
    shard = sorted(manifest.shards)[0]
    path = tmp_path / "cache" / "shards" / f"{shard}.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    groups = list(range(len(manifest.lengths[shard])))
    with pytest.raises(DataError, match=rf"shard '.*/{shard}.parquet' cannot be read: "):
        store.read_row_groups(shard, groups, needed_columns(TapNeeds((0, 1, 2), (-1, -2, -3)), manifest.columns))


def test_chats_are_cut_to_the_target_s_context(tiny_target: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 400}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    _cache(tmp_path / "cache", tiny_target, tmp_path / "chats.jsonl", max_length=2048)
    assert [row["num_tokens"] for row in _all_rows(tmp_path / "cache")] == [512]
