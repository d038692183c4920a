"""From stored bytes back to values, on the device that needs them."""

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

    What is stored travels to the device, and is decoded there: a half or a quarter of the bytes.
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
            columns: codec and width by tap column, as the manifest has them.
            device: where the values are wanted.
            channels: of the quantised columns; without them these decode to deviations in units of each channel.
            dtype: what quantised columns decode to; others keep the type they are stored in.
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
        """The decoder of a complete cache.

        Raises:
            DataError: columns are quantised, and the file that says how is missing or damaged.
        """
        return cls(manifest.columns, device, read_channels(store, manifest.columns), dtype)

    def decode(self, table: pa.Table, name: str) -> Float[Tensor, "tokens width"]:
        """The values of one column, chats one after the other."""
        column = self.columns[name]
        chosen = codec(column.codec)
        data = torch.from_numpy(np.concatenate([_bytes_of(chunk) for chunk in table.column(name).chunks]))
        data = data.to(self.device, non_blocking=True).view(-1, chosen.bytes_per_token(column.width))
        return chosen.decode(data, column.width, self._channels.get(name), self.dtype)


def _bytes_of(array: pa.BinaryArray) -> np.ndarray:
    """The values' bytes of a binary array as one uint8 array, without a copy."""
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(array.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
