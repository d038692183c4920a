"""Decodes stored bytes to values on the device that needs them."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from moray.activations.format.channels import Channels, read_channels
from moray.activations.format.codec import codec
from moray.activations.format.manifest import Manifest
from moray.activations.format.schema import Column
from moray.activations.format.store import CacheStore


class TapDecoder:
    """Decodes the tap columns of one cache.

    The encoded bytes are copied to the device and decoded there, which for 8-bit codecs and int4 transfers about half
    or a quarter of the bytes of bfloat16 values.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        device: torch.device | str = "cpu",
        channels: Channels | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """
        Args:
            columns: codec and width by tap column, as in the manifest.
            device: device of the decoded values.
            channels: channels of the quantised columns; without them, these decode to deviations in units of each
                channel's scale.
            dtype: type of decoded quantised columns; others keep the type they are stored in.
        """
        self.columns = columns
        self.device = torch.device(device)
        self.dtype = dtype
        self._channels = {name: column.to(self.device) for name, column in (channels or {}).items()}

    @classmethod
    def open(
        cls,
        store: CacheStore,
        manifest: Manifest,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> "TapDecoder":
        """Open the decoder of a complete cache.

        Raises:
            DataError: columns are quantised, and channels.parquet is missing or damaged.
        """
        return cls(manifest.columns, device, read_channels(store, manifest.columns), dtype)

    def decode(self, table: pa.Table, name: str) -> Float[Tensor, "tokens width"]:
        """Decode the values of one column, with its chats concatenated."""
        column = self.columns[name]
        chosen = codec(column.codec)
        data = torch.from_numpy(np.concatenate([_bytes_of(chunk) for chunk in table.column(name).chunks]))
        data = data.to(self.device, non_blocking=True).view(-1, chosen.bytes_per_token(column.width))
        return chosen.decode(data, column.width, self._channels.get(name), self.dtype)


def _bytes_of(array: pa.BinaryArray) -> np.ndarray:
    """Return the bytes of a binary array's values as one uint8 array, without a copy."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(array.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
