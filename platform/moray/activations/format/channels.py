"""Measures and stores the offset and scale of every channel of the quantised columns.

They are measured once per cache, by running the target on a few planned batches, and stored beside the shards: every
process that writes or reads the cache uses the same ones, including a job that resumes after a kill. Both are float32,
so they are read exactly as they were written.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from moray.activations.format.schema import QUANTISED, Column
from moray.activations.format.store import CacheStore
from moray.errors import DataError

CHANNELS_FILE = "channels.parquet"
_MIN_SCALE = 1e-2
_RESTORE = "restore the file that was written with this cache, or remove the cache and cache again"


@dataclass(frozen=True)
class ColumnChannels:
    """Offset and scale of the channels of one column; float32."""

    offset: Float[Tensor, " width"]
    scale: Float[Tensor, " width"]

    def to(self, device: torch.device | str) -> "ColumnChannels":
        """Return the same channels on another device."""
        return ColumnChannels(self.offset.to(device), self.scale.to(device))


Channels = Mapping[str, ColumnChannels]
"""Channels by tap column."""


def quantised_columns(columns: Mapping[str, Column]) -> list[str]:
    """Return the columns that need channels."""
    return [name for name, column in columns.items() if column.codec in QUANTISED]


class ChannelStatistics:
    """Mean and standard deviation of one column's channels, over any number of batches; float64."""

    def __init__(self) -> None:
        self._width: int | None = None
        self._num_tokens = 0
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        self._shift: Tensor | None = None

    def add(self, values: Float[Tensor, "tokens width"]) -> None:
        """Add one batch, except tokens whose values are all 0: they skip this layer of a sparse target."""
        self._width = values.shape[1]
        values = values[values.any(dim=1)].double()
        if not values.shape[0]:
            return
        if self._shift is None or self._sum is None or self._squares is None:
            # Sum deviations from a rough mean: squares of channels far from zero would swamp their variance.
            self._shift = values.mean(dim=0)
            self._sum = torch.zeros_like(self._shift)
            self._squares = torch.zeros_like(self._shift)
        values = values - self._shift
        self._num_tokens += values.shape[0]
        self._sum += values.sum(dim=0)
        self._squares += values.square().sum(dim=0)

    def channels(self) -> ColumnChannels:
        """Return the means as offsets and the standard deviations as scales, on the CPU.

        The scale of a channel is at least a hundredth of the mean deviation: a nearly constant channel that varies
        later must not take the whole range of its token. If every token skips the layer, the offsets are 0 and the
        scales 1.
        """
        assert self._width is not None, "add a batch first"
        if self._shift is None:
            return ColumnChannels(torch.zeros(self._width), torch.ones(self._width))
        assert self._sum is not None
        assert self._squares is not None
        mean = self._sum / self._num_tokens
        deviation = (self._squares / self._num_tokens - mean.square()).clamp(min=0).sqrt()
        usual = deviation.mean()
        scale = deviation.clamp(min=float(usual) * _MIN_SCALE) if float(usual) > 0 else torch.ones_like(deviation)
        scale = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        return ColumnChannels((self._shift + mean).float().cpu(), scale.cpu())


def write_channels(store: CacheStore, channels: Channels) -> None:
    """Store the channels beside the shards: one row per column, with lists of float32."""
    columns = {
        "column": pa.array(list(channels), pa.string()),
        "offset": _lists(column.offset for column in channels.values()),
        "scale": _lists(column.scale for column in channels.values()),
    }
    store.write_table(CHANNELS_FILE, pa.table(columns))


def read_channels(store: CacheStore, columns: Mapping[str, Column]) -> Channels:
    """Read the channels of a cache; empty if no column is quantised.

    Raises:
        DataError: the file is missing or damaged, or lacks a column.
    """
    needed = quantised_columns(columns)
    if not needed:
        return {}
    if not store.exists(CHANNELS_FILE):
        raise DataError(
            f"'{store.uri}/{CHANNELS_FILE}' is missing, without which quantised columns mean nothing: put it back, or "
            "remove the cache and cache again"
        )
    table = store.read_table(CHANNELS_FILE)
    rows = {name: index for index, name in enumerate(table.column("column").to_pylist())}
    found = {}
    for name in needed:
        if name not in rows:
            raise DataError(f"'{store.uri}/{CHANNELS_FILE}' has no column '{name}': {_RESTORE}")
        offset, scale = (
            torch.from_numpy(np.array(table.column(kind)[rows[name]].values.to_numpy(), dtype=np.float32))
            for kind in ("offset", "scale")
        )
        if not offset.shape == scale.shape == (columns[name].width,):
            raise DataError(
                f"'{store.uri}/{CHANNELS_FILE}' has {len(offset)} channels for column '{name}', which has "
                f"{columns[name].width}: {_RESTORE}"
            )
        found[name] = ColumnChannels(offset, scale)
    return found


def read_known_channels(store: CacheStore) -> Channels:
    """Read all channels of a cache, including those of columns not (yet) stored; empty if it has no such file."""
    if not store.exists(CHANNELS_FILE):
        return {}
    widths = {row["column"]: len(row["offset"]) for row in store.read_table(CHANNELS_FILE).to_pylist()}
    return read_channels(store, {name: Column(QUANTISED[0], width) for name, width in widths.items()})


def channels_fingerprint(channels: Channels) -> str | None:
    """Return a hash of all offsets and scales; None if there are none. Shards record it in their schema."""
    if not channels:
        return None
    digest = hashlib.sha256()
    for name, column in channels.items():
        digest.update(name.encode() + column.offset.cpu().numpy().tobytes() + column.scale.cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _lists(rows: Iterable[Tensor]) -> pa.Array:
    return pa.array([row.cpu().numpy() for row in rows], pa.list_(pa.float32()))
