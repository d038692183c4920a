"""From chats to shards: plans that lose nothing and waste little, and bytes that are the target's own states."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_targets import load_sparse_target
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from moray.activations.capture.attempts import MAX_ATTEMPTS, Attempts
from moray.activations.capture.calibration import calibrate, calibration_batches
from moray.activations.capture.extract import ShardWriter, find_channels, token_arrays
from moray.activations.capture.record import record_taps
from moray.activations.format.channels import channels_fingerprint, read_channels, write_channels
from moray.activations.format.decode import TapDecoder
from moray.activations.format.schema import TOKENS_SCHEMA, CacheConfig, Column, bytes_per_token
from moray.activations.format.store import CacheStore
from moray.activations.planning.shards import ShardPlan, plan_shards, tap_columns
from moray.errors import ConfigError, DataError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig, TargetSpec, read_spec

LAYERS, HIDDEN, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 32, 2, 8, 97
LENGTHS = (5, 17, 9, 30, 2)


def realistic_lengths(number: int, seed: int = 0) -> list[int]:
    """Log-normal, as chats are: median 700, cut at 2048."""
    rng = random.Random(seed)
    return [min(2048, max(8, int(rng.lognormvariate(6.55, 0.7)))) for _ in range(number)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def spec(folder: Path) -> TargetSpec:
    return read_spec(str(folder))


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    """A store with one part of five chats of random tokens."""
    store = CacheStore(str(tmp_path / "cache"))
    rng = random.Random(1)
    rows = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    masks = [[rng.random() < 0.5 for _ in row] for row in rows]
    part = {"uid": [f"chat-{i}" for i in range(len(rows))], "tokens": rows, "response_mask": masks}
    store.write_table("tokens/part-00000.parquet", pa.table(part, schema=TOKENS_SCHEMA))
    return store


# --- Plans ---


def test_every_row_is_planned_exactly_once_and_names_are_unique() -> None:
    lengths = realistic_lengths(3000)
    plans = plan_shards("part-00007", lengths, CacheConfig(shard_mib=16), token_bytes=1000)
    assert len(plans) > 50
    assert sorted(row for plan in plans for batch in plan.batches for row in batch) == list(range(3000))
    assert len({plan.name for plan in plans}) == len(plans)
    assert {plan.name.split("-")[0] for plan in plans} == {"00007"}
    names = {plan_shards(part, [5], CacheConfig(), 1)[0].name for part in ("part-00000", "part-100000", "part-200000")}
    assert names == {"00000-00000", "100000-00000", "200000-00000"}


def test_padding_wastes_less_than_five_percent_and_no_batch_breaks_the_budget() -> None:
    lengths = realistic_lengths(2048)
    plans = plan_shards("part-00000", lengths, CacheConfig(batch_tokens=16384), token_bytes=1000)
    batches = [[lengths[row] for row in batch] for plan in plans for batch in plan.batches]
    padded = [max(batch) * len(batch) for batch in batches]
    assert max(padded) <= 16384
    assert sum(lengths) / sum(padded) > 0.95


def test_a_chat_longer_than_the_budget_makes_a_batch_of_its_own() -> None:
    plans = plan_shards("part-00000", [10, 500, 20, 90], CacheConfig(batch_tokens=100), token_bytes=1)
    assert [batch for plan in plans for batch in plan.batches] == [[1], [3], [2, 0]]


def test_shards_close_at_their_size() -> None:
    lengths = realistic_lengths(2048)
    config = CacheConfig(shard_mib=64, batch_tokens=16384)
    plans = plan_shards("part-00000", lengths, config, token_bytes=1000)
    sizes = [sum(lengths[row] for batch in plan.batches for row in batch) * 1000 for plan in plans]
    assert all(64 << 20 <= size < (64 << 20) + 16384 * 1000 for size in sizes[:-1])


def test_plans_are_deterministic_and_an_empty_part_makes_none() -> None:
    lengths = realistic_lengths(300)
    config = CacheConfig(shard_mib=1)
    assert plan_shards("part-00000", lengths, config, 100) == plan_shards("part-00000", list(lengths), config, 100)
    assert plan_shards("part-00000", [], config, 100) == []


def test_columns_follow_the_target_and_the_configuration(spec: TargetSpec) -> None:
    columns = tap_columns(spec, CacheConfig(kv_layers=(0, 2), hidden_depths=(-1, -4), hidden_codec="float32"))
    assert columns == {
        "kv.00": Column("bfloat16", 2 * KV_HEADS * HEAD_DIM),
        "kv.02": Column("bfloat16", 2 * KV_HEADS * HEAD_DIM),
        "hidden.-1": Column("float32", HIDDEN),
        "hidden.-4": Column("float32", HIDDEN),
    }
    assert bytes_per_token(columns) == 2 * 32 * 2 + 2 * 32 * 4
    with pytest.raises(ConfigError, match=r"cache.kv_layers holds 3; the target has layers 0 to 2"):
        tap_columns(spec, CacheConfig(kv_layers=(3,)))
    with pytest.raises(ConfigError, match=r"cache.hidden_depths holds -5; accepted are -1 to -4"):
        tap_columns(spec, CacheConfig(hidden_depths=(-5,)))


# --- Shards ---


def _write(folder: Path, store: CacheStore, config: CacheConfig, target: Target | None = None) -> pa.Table:
    target = target or Target.load(TargetConfig(model=str(folder)))
    plan = plan_shards("part-00000", LENGTHS, config, 100)[0]
    info = ShardWriter(target, store, config).write(plan)
    assert store.committed() == {info.name: info}
    assert info.rows == len(LENGTHS)
    assert info.tokens == sum(LENGTHS)
    assert info.row_groups == [[LENGTHS[row] for row in rows] for rows in plan.batches]
    assert len(info.row_groups) > 1
    return pq.read_table(Path(store.uri) / "shards" / f"{info.name}.parquet")


@torch.no_grad()
def _reference(folder: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
    """The taps of one chat from the model's own forward pass, alone and without padding."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    output = model(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True)
    taps = {f"hidden.{-1 - i}": output.hidden_states[LAYERS - i][0] for i in range(LAYERS + 1)}
    for index in range(LAYERS):
        keys, values = cache.layers[index].keys[0], cache.layers[index].values[0]  # heads, seq, head_dim
        taps[f"kv.{index:02d}"] = torch.stack([keys, values]).permute(2, 1, 0, 3).flatten(1)
    return taps


@pytest.mark.parametrize("codec_name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_columns_decode_to_the_states_of_the_models_own_forward_pass(
    folder: Path, store: CacheStore, codec_name: str, compression: str
) -> None:
    config = CacheConfig.model_validate(
        {
            "hidden_depths": (-1, -2, -3, -4),
            "kv_codec": codec_name,
            "hidden_codec": codec_name,
            "compression": compression,
            "batch_tokens": 64,
        }
    )
    table = _write(folder, store, config)
    part = {row["uid"]: row for row in store.read_table("tokens/part-00000.parquet").to_pylist()}
    dtype = getattr(torch, codec_name)
    assert sorted(table.column("uid").to_pylist()) == sorted(part)
    for row in table.to_pylist():
        assert row["tokens"] == part[row["uid"]]["tokens"]
        assert row["response_mask"] == part[row["uid"]]["response_mask"]
        assert row["num_tokens"] == len(row["tokens"])
        reference = _reference(folder, row["tokens"])
        assert set(reference) == {name for name in row if name.startswith(("kv.", "hidden."))}
        for name, expected in reference.items():
            got = torch.frombuffer(bytearray(row[name]), dtype=dtype).view(row["num_tokens"], -1).float()
            # One rounding to the stored type, on top of float32's own noise between two ways to batch.
            rounding = torch.finfo(dtype).eps * expected.abs() / 2 if dtype != torch.float32 else 0.0
            assert bool(((got - expected).abs() <= rounding + 2e-5).all()), name


def _batches(store: CacheStore) -> list[list[np.ndarray]]:
    rows = token_arrays(store.read_table("tokens/part-00000.parquet"))
    return [rows[:3], rows[3:]]


@pytest.mark.parametrize(("codec_name", "error"), [("fp8", 0.05), ("int8", 0.02), ("int4", 0.25)])
def test_quantised_columns_decode_close_to_the_states(
    folder: Path, store: CacheStore, codec_name: str, error: float
) -> None:
    config = CacheConfig.model_validate(
        {
            "kv_codec": codec_name,
            "hidden_codec": codec_name,
            "column_codecs": {"hidden.-2": "float32"},
            "batch_tokens": 64,
        }
    )
    target = Target.load(TargetConfig(model=str(folder)))
    with pytest.raises(DataError, match=r"channels.parquet' is missing"):
        ShardWriter(target, store, config)
    result = calibrate(target, config, _batches(store))
    channels, speed = result.channels, result.tokens_per_second
    assert speed > 0
    write_channels(store, channels)
    table = _write(folder, store, config, target)
    columns = tap_columns(target.spec, config)
    assert set(channels) == columns.keys() - {"hidden.-2"}
    described = json.loads(table.schema.metadata[b"moray"])
    assert described["channels"] == channels_fingerprint(channels)
    decoder = TapDecoder(columns, channels=read_channels(store, columns))
    references = [_reference(folder, tokens) for tokens in table.column("tokens").to_pylist()]
    for name in columns:
        decoded = decoder.decode(table, name)
        expected = torch.cat([reference[name] for reference in references])
        assert decoded.dtype == (torch.float32 if name == "hidden.-2" else torch.bfloat16)
        deviation = (expected - expected.mean(dim=0)).square().mean()
        wrong = ((decoded.float() - expected).square().mean() / deviation).sqrt()
        assert float(wrong) < (1e-4 if name == "hidden.-2" else error), name
    # Whatever the batches, the same ones give the same channels: a resumed job may find them again.
    again = calibrate(target, config, _batches(store)).channels
    assert channels_fingerprint(again) == channels_fingerprint(channels)


@pytest.mark.parametrize("codec_name", ["bfloat16", "int8", "int4"])
def test_tokens_that_skip_a_layer_of_a_sparse_target_have_zeros_there(
    tmp_path: Path, store: CacheStore, codec_name: str
) -> None:
    target = load_sparse_target(tmp_path / "sparse", None, 0, vocab_size=VOCABULARY).target
    config = CacheConfig.model_validate({"kv_codec": codec_name, "batch_tokens": 64})
    write_channels(store, calibrate(target, config, _batches(store)).channels)
    table = _write(tmp_path / "sparse", store, config, target)
    columns = tap_columns(target.spec, config)
    decoder = TapDecoder(columns, channels=read_channels(store, columns))
    routes = []
    for tokens in table.column("tokens").to_pylist():
        ids = torch.tensor(tokens)[None]
        output = target.forward(ids, torch.arange(len(tokens))[None], None, target.new_cache(len(tokens)))
        assert output.routes is not None
        routes.append(output.routes[:, 0])
    runs = torch.cat(routes, dim=1)
    assert 0.2 < float(runs.float().mean()) < 0.95
    for layer in range(target.spec.num_layers):
        decoded = decoder.decode(table, f"kv.{layer:02}")
        assert decoded.any(dim=1).tolist() == runs[layer].tolist()


def test_calibration_batches_are_spread_over_all_shards() -> None:
    plans = [
        plan
        for part in range(3)
        for plan in plan_shards(f"part-{part:05d}", realistic_lengths(500, part), CacheConfig(shard_mib=16), 1000)
    ]
    chosen = calibration_batches(plans)
    assert [len(plan.batches) for plan in chosen] == [1] * 4
    assert {plan.part for plan in chosen} == {"part-00000", "part-00001", "part-00002"}
    assert chosen == calibration_batches(plans)
    assert len(calibration_batches(plan_shards("part-00000", [5, 6], CacheConfig(), 1))) == 1


def test_a_shard_is_written_batch_by_batch_and_committed_at_the_end(folder: Path, store: CacheStore) -> None:
    config = CacheConfig(batch_tokens=64)
    plan = plan_shards("part-00000", LENGTHS, config, 100)[0]
    counts = []
    for tokens in ShardWriter(Target.load(TargetConfig(model=str(folder))), store, config).write_in_batches(plan):
        counts.append(tokens)
        assert not store.committed()
    assert counts == [sum(LENGTHS[row] for row in rows) for rows in plan.batches]
    assert store.committed()[plan.name].tokens == sum(LENGTHS)


def test_a_value_that_its_codec_cannot_hold_is_refused(folder: Path, store: CacheStore) -> None:
    """Finite in the target, infinite as float16."""
    target = Target.load(TargetConfig(model=str(folder)))
    target.model.model.layers[0].self_attn.v_proj.weight.data.mul_(1e7)
    for name in ("float16", "bfloat16"):
        config = CacheConfig(batch_tokens=64, kv_codec=name)
        writer = ShardWriter(target, store, config)
        plan = plan_shards("part-00000", LENGTHS, config, 100)[0]
        if name == "bfloat16":
            writer.compute(plan, 0)
            continue
        with pytest.raises(DataError, match=r"^column 'kv.00' of chat 'chat-\d+' is not finite as float16: .*bfloat16"):
            writer.compute(plan, 0)


def test_states_that_are_not_finite_give_no_channels(folder: Path, store: CacheStore) -> None:
    target = Target.load(TargetConfig(model=str(folder)))
    target.model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"^column 'kv.01' is not finite in some chats; try target.dtype=float32"):
        find_channels(target, CacheConfig(kv_codec="int8"), _batches(store))


def test_a_recorded_pass_makes_no_mask_and_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(TargetConfig(model=str(folder)))
    masks = []
    forward = Target.forward

    def watched(self, tokens, positions, mask, cache, hidden_depths=()):
        masks.append(mask)
        assert cache.data.numel() == 0
        return forward(self, tokens, positions, mask, cache, hidden_depths)

    monkeypatch.setattr(Target, "forward", watched)
    chats = [np.arange(length) for length in (3, 9)]
    taps = dict(record_taps(target, CacheConfig(kv_layers=(1,), hidden_depths=(-2,)), chats))
    assert masks == [None]
    assert {name: values.shape[0] for name, values in taps.items()} == {"kv.01": 12, "hidden.-2": 12}


def test_statistics_are_those_of_the_states(folder: Path, store: CacheStore) -> None:
    config = CacheConfig(batch_tokens=64)
    _write(folder, store, config)
    (info,) = store.committed().values()
    part = store.read_table("tokens/part-00000.parquet").column("tokens").to_pylist()
    for name in ("hidden.-1", "hidden.-2", "hidden.-3"):
        squares = sum(float(_reference(folder, tokens)[name].pow(2).mean(dim=1).sum()) for tokens in part)
        assert info.hidden_square_sums[name] == pytest.approx(squares, rel=1e-4)


def test_plain_pyarrow_pandas_and_datasets_open_a_shard(folder: Path, store: CacheStore, tmp_path: Path) -> None:
    table = _write(folder, store, CacheConfig(batch_tokens=64))
    path = Path(store.uri) / "shards" / "00000-00000.parquet"
    import datasets
    import pandas as pd

    frame = pd.read_parquet(path)
    loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "hf"))
    wanted = table.to_pylist()
    assert list(frame["uid"]) == loaded["uid"][:] == [row["uid"] for row in wanted]
    assert list(frame["kv.01"]) == loaded["kv.01"][:] == [row["kv.01"] for row in wanted]
    assert [list(tokens) for tokens in frame["tokens"]] == loaded["tokens"][:] == [row["tokens"] for row in wanted]
    metadata = pq.read_schema(path).metadata[b"moray"]
    assert b'"hidden.-1": {"codec": "bfloat16", "width": 32}' in metadata


def test_not_a_number_is_refused_naming_chat_and_column_and_nothing_is_left(folder: Path, store: CacheStore) -> None:
    target = Target.load(TargetConfig(model=str(folder)))
    token = store.read_table("tokens/part-00000.parquet").column("tokens").to_pylist()[2][4]
    others = [
        t
        for i, row in enumerate(store.read_table("tokens/part-00000.parquet").column("tokens").to_pylist())
        for t in (row if i != 2 else [])
    ]
    if token in others:
        # Make the poisoned token the third chat's own.
        rows = store.read_table("tokens/part-00000.parquet").to_pydict()
        rows["tokens"] = [[t if t != token else (token + 1) % VOCABULARY for t in row] for row in rows["tokens"]]
        rows["tokens"][2][4] = token
        store.write_table("tokens/part-00000.parquet", pa.table(rows, schema=TOKENS_SCHEMA))
    target.model.model.embed_tokens.weight.data[token] = float("nan")
    config = CacheConfig(batch_tokens=64)
    plan = plan_shards("part-00000", LENGTHS, config, 100)[0]
    with pytest.raises(DataError, match=r"^column 'kv.00' of chat 'chat-2' is not finite as bfloat16: give .*float32"):
        ShardWriter(target, store, config).write(plan)
    assert store.committed() == {}
    assert store.names("shards", "") == []


def test_a_shard_over_which_replicas_die_is_named_and_other_shards_are_written(folder: Path, store: CacheStore) -> None:
    config = CacheConfig(batch_tokens=64)
    plan = plan_shards("part-00000", LENGTHS, config, 100)[0]
    writer = ShardWriter(Target.load(TargetConfig(model=str(folder))), store, config)
    while Attempts(store, "shards").begin(plan.name):  # what replicas leave that die
        pass
    with pytest.raises(
        DataError, match=rf"^{MAX_ATTEMPTS} target replicas died over shard '{plan.name}' of .*num_targets"
    ):
        writer.write(plan)
    other = replace(plan, name="00000-00009")
    for _ in range(MAX_ATTEMPTS + 1):
        writer.write(other)
    assert store.names("shards", ".attempts") == [f"{plan.name}.attempts"]


def test_a_part_that_is_missing_is_named(folder: Path, store: CacheStore) -> None:
    writer = ShardWriter(Target.load(TargetConfig(model=str(folder))), store, CacheConfig())
    with pytest.raises(DataError, match=r"tokens/part-00009.parquet' cannot be read"):
        writer.write(ShardPlan("part-00009", "00009-00000", [[0]]))
