"""From shards to batches: plans that every worker agrees on and that can be cut anywhere, and padded tensors."""

import random

import pyarrow as pa
import pytest
import torch

from moray.activations.format.codec import codec
from moray.activations.format.decode import TapDecoder
from moray.activations.format.schema import Column
from moray.activations.reading.collate import bytes_per_token, collate, data_shard_batch, needed_columns
from moray.activations.reading.epochs import EpochPlan, plan_epoch
from moray.batch import TapNeeds
from moray.errors import DataError

BATCH_TOKENS = 2048
COLUMNS = {
    "kv.00": Column("bfloat16", 4),
    "kv.01": Column("bfloat16", 4),
    "hidden.-1": Column("float32", 3),
    "hidden.-2": Column("float16", 3),
}


def _shards(seed: int = 0) -> dict[str, list[list[int]]]:
    rng = random.Random(seed)
    return {
        f"{shard:05d}-00000": [
            [min(1024, max(4, int(rng.lognormvariate(4.5, 0.8)))) for _ in range(rng.randint(4, 24))] for _ in range(6)
        ]
        for shard in range(12)
    }


def _batches(plan: EpochPlan, shards: dict[str, list[list[int]]]) -> list[tuple[int, list[tuple[str, int, int]]]]:
    """Step and chats (shard, row group, row) of every batch."""
    found = []
    for window in plan.windows:
        rows = [(shard, group, row) for shard, group in window.row_groups for row in range(len(shards[shard][group]))]
        for offset, batch in enumerate(window.batches):
            found.append((window.first_step + offset, [rows[index] for index in batch]))
    return found


@pytest.mark.parametrize("num_data_shards", [1, 2, 3, 7])
def test_every_chat_comes_once_and_lanes_make_equal_steps(num_data_shards: int) -> None:
    shards = _shards()
    plans = plan_epoch(shards, BATCH_TOKENS, seed=5, epoch=2, num_data_shards=num_data_shards)
    assert len(plans) == num_data_shards
    assert len({plan.num_steps for plan in plans}) == 1
    seen = []
    for plan in plans:
        batches = _batches(plan, shards)
        assert [step for step, _ in batches] == list(range(plan.num_steps))
        for _, chats in batches:
            lengths = [shards[shard][group][row] for shard, group, row in chats]
            assert max(lengths) * len(lengths) <= BATCH_TOKENS
            seen += chats
    assert len(seen) == len(set(seen))
    assert len(seen) == sum(len(group) for groups in shards.values() for group in groups)


def _sorted_shards(mean_log: float, deviation: float, num_chats: int) -> dict[str, list[list[int]]]:
    """As a cache has them: parts of 2048 chats, sorted by length, row groups of at most 16384 padded tokens."""
    rng = random.Random(1)
    shards = {}
    for part in range(0, num_chats, 2048):
        groups: list[list[int]] = []
        for length in sorted(min(2048, max(16, int(rng.lognormvariate(mean_log, deviation)))) for _ in range(2048)):
            if not groups or length * (len(groups[-1]) + 1) > 16384:
                groups.append([])
            groups[-1].append(length)
        shards[f"{part:06d}"] = groups
    return shards


# About UltraChat's lengths with Llama's tokenizer, cut at 2048; and shorter chats that differ more.
@pytest.mark.parametrize("window_tokens", [None, 8000, 40000])
@pytest.mark.parametrize(
    ("mean_log", "deviation", "batch_tokens", "num_data_shards"),
    [(6.9, 0.55, 16384, 4), (6.9, 0.55, 32768, 1), (6.0, 0.8, 8192, 1)],
)
def test_little_is_padding_and_batches_are_full(
    mean_log: float, deviation: float, window_tokens: int | None, batch_tokens: int, num_data_shards: int
) -> None:
    """However little is read at a time: a small window holds row groups of similar length."""
    shards = _sorted_shards(mean_log, deviation, 4 * 2048)
    most = None if window_tokens is None else max(window_tokens, batch_tokens)
    used = padded = num_batches = 0
    for plan in plan_epoch(shards, batch_tokens, 0, 0, num_data_shards, most):
        for window in plan.windows:
            assert window.num_tokens <= (most or 16 * batch_tokens) or len(window.row_groups) == 1
        for _, chats in _batches(plan, shards):
            lengths = [shards[shard][group][row] for shard, group, row in chats]
            used, padded, num_batches = used + sum(lengths), padded + max(lengths) * len(lengths), num_batches + 1
    assert 1 - used / padded < 0.05
    assert padded / num_batches > 0.6 * batch_tokens


def test_plans_are_deterministic_and_differ_from_epoch_to_epoch_and_seed_to_seed() -> None:
    shards = _shards()
    backwards = dict(reversed(list(shards.items())))
    assert plan_epoch(shards, BATCH_TOKENS, 1, 0, 2) == plan_epoch(backwards, BATCH_TOKENS, 1, 0, 2)
    first = plan_epoch(shards, BATCH_TOKENS, 1, 0, 1)[0]
    for other in (plan_epoch(shards, BATCH_TOKENS, 1, 1, 1)[0], plan_epoch(shards, BATCH_TOKENS, 2, 0, 1)[0]):
        assert {tuple(sorted(chats)) for _, chats in _batches(first, shards)} != {
            tuple(sorted(chats)) for _, chats in _batches(other, shards)
        }


@pytest.mark.parametrize("num_data_shards", [1, 2])
def test_before_and_after_cut_an_epoch_anywhere_without_loss(num_data_shards: int) -> None:
    shards = _shards()
    for plan in plan_epoch(shards, BATCH_TOKENS, 0, 0, num_data_shards):
        whole = _batches(plan, shards)
        assert len(plan.windows) > 1
        for step in range(plan.num_steps + 1):
            assert _batches(plan.before(step), shards) == whole[:step]
            assert _batches(plan.after(step), shards) == whole[step:]
        assert _batches(plan.after(3).before(7), shards) == whole[3:7]


def test_more_lanes_than_row_groups_leave_no_steps() -> None:
    plans = plan_epoch({"a": [[5, 6]]}, 64, 0, 0, num_data_shards=2)
    assert [plan.num_steps for plan in plans] == [0, 0]
    assert all(not plan.windows for plan in plans)


def _row(length: int, seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    row: dict[str, object] = {
        "uid": f"chat-{seed}",
        "num_tokens": length,
        "tokens": [seed * 100 + i for i in range(length)],
        "response_mask": [i % 2 == 0 for i in range(length)],
    }
    for name, column in COLUMNS.items():
        values = torch.randn(length, column.width, generator=generator)
        row[name] = codec(column.codec).encode(values).numpy().tobytes()
    return row


def _table(lengths: list[int]) -> pa.Table:
    fields = [
        ("uid", pa.string()),
        ("num_tokens", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),
    ]
    schema = pa.schema([*fields, *((name, pa.binary()) for name in COLUMNS)])
    rows = [_row(length, seed) for seed, length in enumerate(lengths)]
    return pa.Table.from_pylist(rows, schema=schema)


def _decoded(row: dict[str, object], name: str) -> torch.Tensor:
    dtype = getattr(torch, COLUMNS[name].codec)
    return torch.frombuffer(bytearray(row[name]), dtype=dtype).view(-1, COLUMNS[name].width)  # type: ignore[arg-type]


def test_collate_pads_right_and_keeps_every_value() -> None:
    lengths = [3, 7, 1, 5]
    needs = TapNeeds(kv_layers=(1, 0), hidden_depths=(-2, -1))
    # A slice of a chunked, reordered table: offsets into shared buffers, as the stream hands them over.
    table = pa.concat_tables([_table(lengths).take([1, 3, 0]), _table(lengths).take([2])]).slice(1, 3)
    batch = collate(table, needs, TapDecoder(COLUMNS))
    order = [3, 0, 2]
    assert batch.lengths.tolist() == [5, 3, 1]
    assert batch.tokens.shape == batch.response_mask.shape == (3, 5)
    assert batch.taps.kv is not None
    assert batch.taps.kv.shape == (3, 5, 2, 4)
    assert batch.taps.kv.dtype == torch.bfloat16
    for position, seed in enumerate(order):
        row, length = _row(lengths[seed], seed), lengths[seed]
        assert batch.tokens[position, :length].tolist() == row["tokens"]
        assert batch.response_mask[position, :length].tolist() == row["response_mask"]
        assert not batch.tokens[position, length:].any()
        assert not batch.response_mask[position, length:].any()
        for index, layer in enumerate(needs.kv_layers):
            assert torch.equal(batch.taps.kv[position, :length, index], _decoded(row, f"kv.0{layer}"))
        assert not batch.taps.kv[position, length:].any()
        for depth in needs.hidden_depths:
            assert torch.equal(batch.taps.hidden[depth][position, :length], _decoded(row, f"hidden.{depth}"))
            assert not batch.taps.hidden[depth][position, length:].any()


def test_without_layers_there_are_no_keys_and_values() -> None:
    batch = collate(_table([2, 3]), TapNeeds(hidden_depths=(-1,)), TapDecoder(COLUMNS))
    assert batch.taps.kv is None
    assert list(batch.taps.hidden) == [-1]


def test_a_lane_s_batch_has_its_text_at_once_and_its_taps_when_asked() -> None:
    table, needs = _table([3, 7, 1]), TapNeeds((0,), (-1,))
    decoded = []

    class Watched(TapDecoder):
        def decode(self, table: pa.Table, name: str) -> torch.Tensor:
            decoded.append(name)
            return super().decode(table, name)

    data_shard = data_shard_batch(table, needs, Watched(COLUMNS), data_shard=2)
    whole = collate(table, needs, TapDecoder(COLUMNS))
    assert (data_shard.data_shard, data_shard.uids, data_shard.num_padded) == (2, ("chat-0", "chat-1", "chat-2"), 21)
    assert torch.equal(data_shard.text.tokens, whole.tokens)
    assert torch.equal(data_shard.text.response_mask, whole.response_mask)
    assert data_shard.text.num_tokens == 11
    assert decoded == []
    batch = data_shard.whole("cpu")
    assert decoded == ["kv.00", "hidden.-1"]
    assert batch.taps.kv is not None
    assert whole.taps.kv is not None
    assert torch.equal(batch.taps.kv, whole.taps.kv)
    assert torch.equal(batch.taps.hidden[-1], whole.taps.hidden[-1])


def test_bytes_per_token_are_those_that_are_read() -> None:
    assert bytes_per_token(TapNeeds((0, 1), (-1,)), COLUMNS) == 4 * 2 * 2 + 3 * 4 + 5


def test_needed_columns_are_those_and_no_more_and_a_missing_one_is_named() -> None:
    needs = TapNeeds(kv_layers=(1,), hidden_depths=(-1,))
    assert needed_columns(needs, COLUMNS) == ["uid", "num_tokens", "tokens", "response_mask", "kv.01", "hidden.-1"]
    with pytest.raises(DataError, match=r"no column 'hidden.-3'.*it has kv.00, kv.01, .*cache.hidden_depths"):
        needed_columns(TapNeeds(hidden_depths=(-3,)), COLUMNS)
    with pytest.raises(DataError, match=r"no column 'kv\.07'"):
        needed_columns(TapNeeds(kv_layers=(7,)), COLUMNS)
