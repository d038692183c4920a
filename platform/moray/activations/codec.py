"""Element types of cached activations: tensors to bytes and back.

Arrow has no bfloat16, so values are stored as raw little-endian bytes and the codec is named in the schema.
A codec spends the same number of bytes on every token, which is all that the store needs to know.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from moray.errors import DataError

assert sys.byteorder == "little", "cached activations are little-endian"


@dataclass(frozen=True)
class RawCodec:
    """A floating-point type stored as it is."""

    dtype: torch.dtype

    def bytes_per_token(self, width: int) -> int:
        """Bytes that one token's `width` values take."""
        return width * self.dtype.itemsize

    def encode(self, values: Float[Tensor, "tokens width"]) -> UInt8[Tensor, "tokens bytes"]:
        """Values to bytes, on the device they are on."""
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: np.ndarray, width: int) -> Float[Tensor, "tokens width"]:
        """Bytes (a flat uint8 array, not copied if writable) to values."""
        return torch.from_numpy(data).view(self.dtype).view(-1, width)


_CODECS = {
    "bfloat16": RawCodec(torch.bfloat16),
    "float16": RawCodec(torch.float16),
    "float32": RawCodec(torch.float32),
}


def codec(name: str) -> RawCodec:
    """The codec of that name.

    Raises:
        DataError: a cache names a codec that this version does not have.
    """
    if name not in _CODECS:
        raise DataError(f"codec '{name}' is not known here; known are {', '.join(_CODECS)}: update moray")
    return _CODECS[name]
