"""Collates rows of cached shards into the tensors of a training batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from moray.activations.format.decode import TapDecoder
from moray.activations.format.schema import Column, hidden_column, kv_column
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import command_to_add
from moray.activations.planning.shards import listed
from moray.batch import DataShardBatch, TapNeeds, Taps, TrainBatch
from moray.errors import DataError

_TEXT_BYTES = 5  # a token id and its mask


def needed_columns(needs: TapNeeds, columns: Mapping[str, Column], store: CacheStore | None = None) -> list[str]:
    """Return the columns that a drafter's batches require.

    Args:
        needs: taps that the drafter reads.
        columns: tap columns of the cache.
        store: the cache, if columns can be added to it.

    Raises:
        DataError: the cache lacks a column; names it and, given `store`, the command that adds all missing ones.
    """
    missing = missing_columns(needs, columns)
    if missing:
        advice = "cache again with cache.hidden_depths and cache.kv_layers that include it"
        if store is not None:
            advice = f"to add {listed(missing)}, run {command_to_add(store, missing)}"
        raise DataError(
            f"the cache has no column '{missing[0]}', which this drafter reads; it has {', '.join(columns)}: {advice}"
        )
    return ["uid", "num_tokens", "tokens", "response_mask", *_tap_columns(needs)]


def missing_columns(needs: TapNeeds, columns: Mapping[str, Column]) -> list[str]:
    """Return the tap columns that a drafter reads but a cache lacks."""
    return [name for name in _tap_columns(needs) if name not in columns]


def _tap_columns(needs: TapNeeds) -> list[str]:
    return [kv_column(layer) for layer in needs.kv_layers] + [hidden_column(depth) for depth in needs.hidden_depths]


def bytes_per_token(needs: TapNeeds, columns: Mapping[str, Column]) -> int:
    """Return the bytes per token of the columns that `needed_columns` names, as they are read and transferred."""
    taps = [columns[name] for name in needed_columns(needs, columns) if name in columns]
    return sum(tap.bytes_per_token for tap in taps) + _TEXT_BYTES


def data_shard_batch(table: pa.Table, needs: TapNeeds, decoder: TapDecoder, data_shard: int = 0) -> DataShardBatch:
    """Collate rows of a shard, with the needed columns, into a batch whose taps are decoded on demand, from views."""
    return DataShardBatch(
        data_shard,
        collate_text(table),
        tuple(table.column("uid").to_pylist()),
        partial(_collate_taps, table, needs, decoder),
    )


def collate(table: pa.Table, needs: TapNeeds, decoder: TapDecoder) -> TrainBatch:
    """Collate rows of a shard, with the needed columns, into one padded batch on the decoder's device."""
    text = collate_text(table)
    return TrainBatch(text.tokens, text.response_mask, text.lengths, _collate_taps(table, needs, decoder)).to(
        decoder.device
    )


def collate_text(table: pa.Table) -> TrainBatch:
    """Collate padded tokens, masks and lengths on the CPU, without taps."""
    pad = _Padding(table, torch.device("cpu"))
    tokens = torch.from_numpy(_flat(table, "tokens").astype(np.int64))
    response = torch.from_numpy(_flat(table, "response_mask").astype(np.bool_))
    return TrainBatch(pad(tokens), pad(response), torch.from_numpy(pad.lengths), Taps())


def _collate_taps(table: pa.Table, needs: TapNeeds, decoder: TapDecoder) -> Taps:
    pad = _Padding(table, decoder.device)
    kv = pad.side_by_side([partial(decoder.decode, table, kv_column(layer)) for layer in needs.kv_layers])
    return Taps(kv, {depth: pad(decoder.decode(table, hidden_column(depth))) for depth in needs.hidden_depths})


class _Padding:
    """Pads the concatenated values of chats to rows of equal width."""

    def __init__(self, table: pa.Table, device: torch.device) -> None:
        self.lengths = table.column("num_tokens").to_numpy().astype(np.int64)
        self._shape = (len(self.lengths), int(self.lengths.max()))
        valid = np.arange(self._shape[1]) < self.lengths[:, None]
        self._index = torch.from_numpy(np.flatnonzero(valid.reshape(-1))).to(device)

    def __call__(self, values: Tensor) -> Tensor:
        rows, width = self._shape
        out = values.new_zeros(rows * width, *values.shape[1:])
        return out.index_copy_(0, self._index, values).view(rows, width, *values.shape[1:])

    def side_by_side(self, columns: Sequence[Callable[[], Tensor]]) -> Tensor | None:
        """Decode columns of equal width one at a time, each directly into its slice of the padded result."""
        rows, width = self._shape
        out = None
        for number, decode in enumerate(columns):
            values = decode()
            if out is None:
                out = values.new_zeros(rows * width, len(columns), values.shape[1])
            out[:, number].index_copy_(0, self._index, values)
        return None if out is None else out.unflatten(0, (rows, width))


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
