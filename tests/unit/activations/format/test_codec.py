"""Element types: what every codec gives back and how wrong it may be, and how much room it takes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from moray.activations.format.channels import (
    ChannelStatistics,
    ColumnChannels,
    channels_fingerprint,
    read_channels,
    write_channels,
)
from moray.activations.format.codec import codec
from moray.activations.format.schema import CacheConfig, Column, bytes_per_token
from moray.activations.format.store import CacheStore
from moray.activations.planning.shards import tap_columns
from moray.config import load_config
from moray.errors import ConfigError, DataError
from moray.targets.spec import TargetSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
QUANTISED = {"fp8": 448, "int8": 127, "int4": 7}
LLAMA_3_8B = TargetSpec(
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


def keys(tokens: int = 200, width: int = 64, seed: int = 0) -> Tensor:
    """Values like those of keys: a few channels always large, a few far from zero, heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, width, generator=generator) * (1 + torch.rand(tokens, 1, generator=generator))
    values[:, 3] *= 30
    values[:, 17] = values[:, 17] * 0.5 + 40
    values[:, 40] *= 0.05
    return values


def channels_of(values: Tensor) -> ColumnChannels:
    statistics = ChannelStatistics()
    for piece in values.split(64):
        statistics.add(piece)
    return statistics.channels()


def round_trip(name: str, values: Tensor, channels: ColumnChannels | None = None) -> Tensor:
    data = codec(name).encode(values, channels)
    assert data.shape == (values.shape[0], codec(name).bytes_per_token(values.shape[1]))
    return codec(name).decode(data, values.shape[1], channels, torch.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_decode_to_the_values_rounded_once(name: str) -> None:
    values = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)) * 100
    decoded = round_trip(name, values)
    assert decoded.dtype == DTYPES[name]
    assert torch.equal(decoded, values.to(DTYPES[name]))


def test_bytes_are_little_endian_elements_in_order() -> None:
    data = codec("float16").encode(torch.tensor([[1.0, -2.0], [0.5, 65504.0]])).numpy()
    assert np.frombuffer(data.tobytes(), dtype="<f2").tolist() == [1.0, -2.0, 0.5, 65504.0]
    data = codec("int4").encode(torch.tensor([[7.0, -3.0, 1.0]])).numpy()[0]
    assert np.frombuffer(data[:4].tobytes(), dtype="<f4").tolist() == [1.0]
    assert data[4:].tolist() == [(7 + 8) | ((-3 + 8) << 4), 1 + 8]
    data = codec("int8").encode(torch.tensor([[127.0, -3.0]])).numpy()[0]
    assert data[4:].view(np.int8).tolist() == [127, -3]


def test_values_in_a_strided_view_are_encoded_in_their_own_order() -> None:
    values = torch.arange(12.0).view(3, 4).t()
    for name in ("float32", "int8"):
        assert torch.allclose(round_trip(name, values), values, atol=11 / 254)


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"codec 'int2' is not known here; known are bfloat16, .*, fp8, int8, int4"):
        codec("int2")


@pytest.mark.parametrize("width", [1, 2, 63, 64])
@pytest.mark.parametrize("with_channels", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_values_are_within_their_bounds(name: str, with_channels: bool, width: int) -> None:
    values = keys()[:, :width]
    channels = channels_of(values) if with_channels else None
    scale = channels.scale if channels else torch.ones(width)
    offset = channels.offset if channels else torch.zeros(width)
    units = (values - offset) / scale
    largest = units.abs().amax(dim=1, keepdim=True)
    wrong = ((round_trip(name, values, channels) - offset) / scale - units).abs()
    step = largest / QUANTISED[name]
    bound = torch.maximum(units.abs() / 16, step * 2**-10) if name == "fp8" else step / 2
    assert bool((wrong <= bound * 1.001 + 1e-4 * largest).all())


def test_channels_make_every_codec_better_where_channels_differ() -> None:
    values, seen = keys(seed=1), keys(seed=0)
    deviation = values.var(dim=0)

    def error(name: str, channels: ColumnChannels | None) -> float:
        return float(((round_trip(name, values, channels) - values).square().mean(dim=0) / deviation).mean())

    channels = channels_of(seen)  # found on other chats than those that are cached
    assert error("int4", channels) < 0.05
    assert error("int4", None) > 0.2
    assert error("int8", channels) < error("int8", None) / 10
    assert error("fp8", channels) < error("fp8", None) / 2


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_tokens_come_back(name: str) -> None:
    values = torch.zeros(5, 6)
    values[1, 2] = 3e38
    values[2, 4] = 1e-42  # subnormal
    values[3] = torch.tensor([1e30, -1.0, 0.0, 2.0, -1e30, 1e25])
    values[4] = 1.0
    decoded = round_trip(name, values)
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decoded[0], values[0])
    assert decoded[1, 2] == pytest.approx(3e38, rel=0.01)
    assert torch.allclose(decoded[2], values[2], atol=1e-37)
    assert decoded[3, [0, 4]].tolist() == pytest.approx([1e30, -1e30], rel=0.01)
    assert decoded[4].tolist() == pytest.approx([1.0] * 6, rel=0.01)
    channels = ColumnChannels(torch.full((6,), 0.5), torch.full((6,), 0.01))
    assert bool(torch.isfinite(round_trip(name, values, channels)).all())


@pytest.mark.parametrize("name", QUANTISED)
def test_a_token_that_skips_the_layer_comes_back_as_zeros_whatever_the_channels(name: str) -> None:
    values = keys() + 5.0
    values[3] = values[7] = 0.0
    ran = values.any(dim=1)
    channels = channels_of(values)
    decoded = round_trip(name, values, channels)
    assert decoded.any(dim=1).tolist() == ran.tolist()
    alone = channels_of(values[ran])
    assert torch.allclose(channels.offset, alone.offset), "the others' mean and deviation do not count it"
    assert torch.allclose(channels.scale, alone.scale)
    nothing = torch.zeros(4, 64)
    assert torch.equal(round_trip(name, nothing, channels_of(nothing)), nothing)


def test_quantised_codecs_decode_to_bfloat16_unless_told_otherwise() -> None:
    data = codec("int8").encode(keys())
    assert codec("int8").decode(data, 64).dtype == torch.bfloat16
    assert codec("int8").decode(data, 64, None, torch.float16).dtype == torch.float16


# --- Channels ---


def test_channels_are_mean_and_deviation_and_a_still_one_gets_a_share_of_the_others() -> None:
    values = keys()
    values[:, 5] = 1000.0
    channels = channels_of(values)
    expected = values.double().std(dim=0, correction=0)
    moving = [index for index in range(64) if index != 5]
    assert torch.allclose(channels.offset, values.double().mean(dim=0).float(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(channels.scale[moving], expected[moving].float(), rtol=1e-5)
    assert float(channels.scale[5]) == pytest.approx(0.01 * float(expected.mean()), rel=1e-5)
    still = channels_of(torch.full((4, 3), 2.0))
    assert still.scale.tolist() == [1.0, 1.0, 1.0]


def test_channels_are_kept_bit_for_bit_and_plain_pyarrow_reads_them(tmp_path: Path) -> None:
    store = CacheStore(str(tmp_path))
    columns = {"kv.00": Column("int4", 64), "hidden.-1": Column("bfloat16", 8)}
    assert read_channels(store, {"hidden.-1": columns["hidden.-1"]}) == {}
    with pytest.raises(DataError, match=r"channels.parquet' is missing"):
        read_channels(store, columns)
    channels = {"kv.00": channels_of(keys())}
    write_channels(store, channels)
    found = read_channels(store, columns)
    assert list(found) == ["kv.00"]
    assert torch.equal(found["kv.00"].offset, channels["kv.00"].offset)
    assert torch.equal(found["kv.00"].scale, channels["kv.00"].scale)
    assert channels_fingerprint(found) == channels_fingerprint(channels) != channels_fingerprint({}) is None
    table = pq.read_table(tmp_path / "channels.parquet")
    assert table.schema.field("offset").type == pa.list_(pa.float32())
    assert table.column("column").to_pylist() == ["kv.00"]
    assert table.column("scale").to_pylist()[0] == channels["kv.00"].scale.tolist()
    with pytest.raises(DataError, match=r"has no column 'kv.01'"):
        read_channels(store, {"kv.01": columns["kv.00"]})
    with pytest.raises(DataError, match=r"has 64 channels for column 'kv.00', which has 32"):
        read_channels(store, {"kv.00": Column("int4", 32)})


# --- Sizes ---


@pytest.mark.parametrize(
    ("settings", "kibibytes"),
    [
        ({"kv_layers": (), "hidden_depths": (-1,)}, 8),
        ({"kv_layers": (), "hidden_depths": (-1, -2, -3, -4)}, 32),
        ({"hidden_depths": (-1,)}, 136),
        ({"hidden_depths": (-1,), "kv_codec": "fp8", "hidden_codec": "fp8"}, 68),
        ({"hidden_depths": (-1,), "kv_codec": "int8", "hidden_codec": "int8"}, 68),
        ({"hidden_depths": (-1,), "kv_codec": "int4", "hidden_codec": "fp8"}, 36),
    ],
)
def test_llama_3_8b_takes_what_the_design_says(settings: dict, kibibytes: int, tmp_path: Path) -> None:
    columns = tap_columns(LLAMA_3_8B, CacheConfig(**settings))
    assert bytes_per_token(columns) / 1024 == pytest.approx(kibibytes, rel=0.02)
    # A slice, actually encoded and written: one column of each kind, 64 tokens.
    kinds = {name.split(".")[0]: (name, column) for name, column in columns.items()}
    written = 0
    for kind, (name, column) in kinds.items():
        values = torch.randn(64, column.width, generator=torch.Generator().manual_seed(0)).bfloat16()
        data = codec(column.codec).encode(values).numpy().tobytes()
        path = tmp_path / f"{kind}.parquet"
        table = pa.table({name: pa.array([data], pa.binary())})
        pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
        written += path.stat().st_size * sum(other.startswith(kind) for other in columns)
    assert written / 64 / 1024 == pytest.approx(kibibytes, rel=0.02)


# --- Configuration ---


def test_single_columns_may_have_a_codec_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "cache.yaml"
    path.write_text("kv_codec: int4\ncolumn_codecs:\n  hidden.-1: float32\n  kv.00: int8\n")
    config = load_config(CacheConfig, [str(path), "column_codecs={hidden.-1: bfloat16}", "hidden_codec=fp8"])
    columns = tap_columns(LLAMA_3_8B, config)
    found = {name: column.codec for name, column in columns.items()}
    assert found["kv.00"] == "int8"
    assert found["kv.01"] == found["kv.31"] == "int4"
    assert found["hidden.-1"] == "bfloat16"
    assert found["hidden.-2"] == "fp8"
    with pytest.raises(ConfigError, match=r"names 'hidden.1', which is not cached; .*did you mean 'hidden.-1'"):
        tap_columns(LLAMA_3_8B, CacheConfig(column_codecs={"hidden.1": "fp8"}))
    with pytest.raises(ConfigError, match=r"accepted are 'bfloat16', .* or 'int4'"):
        load_config(CacheConfig, ["column_codecs={hidden.-1: fp9}"])
    with pytest.raises(ConfigError, match=r"both empty"):
        tap_columns(LLAMA_3_8B, CacheConfig(kv_layers=(), hidden_depths=()))
