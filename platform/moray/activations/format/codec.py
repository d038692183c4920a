"""Encodes activations as bytes and decodes them, on the device of the tensors.

Arrow has no bfloat16, fp8 or 4-bit type, so values are stored as raw little-endian bytes and the schema names the
codec. A codec uses the same number of bytes for every token, which is all that the store needs to know.
`moray.activations.format.schema` shows the byte layout.
"""

import sys
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from moray.activations.format.channels import ColumnChannels
from moray.activations.format.schema import SCALE_BYTES, codec_bytes
from moray.errors import DataError

assert sys.byteorder == "little", "cached activations are little-endian"

_TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max / 2  # leaves headroom for rounding in element * scale


@dataclass(frozen=True)
class RawCodec:
    """Stores a floating-point type as it is, and ignores channels."""

    dtype: torch.dtype

    def bytes_per_token(self, width: int) -> int:
        """Return the bytes of one token with `width` values."""
        return width * self.dtype.itemsize

    def encode(
        self, values: Float[Tensor, "tokens width"], channels: ColumnChannels | None = None
    ) -> UInt8[Tensor, "tokens bytes"]:
        """Encode values as bytes on their device. No codec checks for non-finite values."""
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def can_hold(self, values: Float[Tensor, "tokens width"]) -> Bool[Tensor, " tokens"]:
        """Return which tokens have finite values that stay finite in the stored type."""
        return torch.isfinite(values.to(self.dtype)).all(dim=1)

    def decode(
        self,
        data: UInt8[Tensor, "tokens bytes"],
        width: int,
        channels: ColumnChannels | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Float[Tensor, "tokens width"]:
        """Decode bytes to values of the stored type on their device, without a copy if they are contiguous."""
        return data.contiguous().view(-1).view(self.dtype).view(-1, width)


@dataclass(frozen=True)
class QuantisedCodec:
    """Stores 4 or 8 bits per element, with one scale per token.

    Values are first centred and scaled by channel, because keys have channels that are always large (KIVI, section 3);
    then the largest value of a token is mapped to the largest element. In units of the channel's scale, the error of an
    integer is at most half a step (the token's largest value / (2 * `largest`)); the error of an fp8 value is at most
    1/16 of the value or, near zero, half of fp8's smallest number. Values beyond 1.7e38 such units are clipped.

    A token whose values are all 0 gets the scale 0 and decodes to exactly 0 with any channels: a token that skips
    a layer of a sparse target has such values there.
    """

    name: str
    largest: int
    """Value of the largest element."""

    def bytes_per_token(self, width: int) -> int:
        """Return the bytes of one token with `width` values, its scale included."""
        return codec_bytes(self.name, width)

    def encode(
        self, values: Float[Tensor, "tokens width"], channels: ColumnChannels | None = None
    ) -> UInt8[Tensor, "tokens bytes"]:
        """Encode the values of each token as a scale and elements."""
        centred = values.float()
        is_skipped = ~values.any(dim=1, keepdim=True)
        if channels is not None:
            centred = ((centred - channels.offset) / channels.scale).clamp_(-_LARGEST, _LARGEST)
        # Keep the scale a normal number, even for zeros and subnormal values, to avoid a division by zero.
        scale = (centred.abs().amax(dim=1, keepdim=True) / self.largest).clamp_(min=_TINY)
        elements = (centred / scale).clamp_(-self.largest, self.largest).masked_fill_(is_skipped, 0.0)
        return torch.cat([scale.masked_fill(is_skipped, 0.0).view(torch.uint8), self._pack(elements)], dim=1)

    def decode(
        self,
        data: UInt8[Tensor, "tokens bytes"],
        width: int,
        channels: ColumnChannels | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Float[Tensor, "tokens width"]:
        """Decode the scale and elements of each token to values of type `dtype`."""
        scale = data[:, :SCALE_BYTES].contiguous().view(torch.float32)
        values = self._unpack(data[:, SCALE_BYTES:], width).mul_(scale)
        if channels is not None:
            values = values.mul_(channels.scale).addcmul_(channels.offset, (scale > 0).float())
        return values.to(dtype)

    def can_hold(self, values: Float[Tensor, "tokens width"]) -> Bool[Tensor, " tokens"]:
        """Return which tokens have only finite values."""
        return torch.isfinite(values).all(dim=1)

    def _pack(self, elements: Float[Tensor, "tokens width"]) -> UInt8[Tensor, "tokens bytes"]:
        if self.name == "fp8":
            return elements.to(torch.float8_e4m3fn).view(torch.uint8)
        if self.name == "int8":
            return elements.round_().to(torch.int8).view(torch.uint8)
        halves = elements.round_().add_(8).to(torch.uint8)
        if halves.shape[1] % 2:
            halves = torch.nn.functional.pad(halves, (0, 1))
        return halves[:, 0::2] | (halves[:, 1::2] << 4)

    def _unpack(self, data: UInt8[Tensor, "tokens bytes"], width: int) -> Float[Tensor, "tokens width"]:
        if self.name == "fp8":
            return data.view(torch.float8_e4m3fn).float()
        if self.name == "int8":
            return data.view(torch.int8).float()
        halves = torch.stack([data & 15, data >> 4], dim=2).flatten(1)[:, :width]
        return halves.float().sub_(8)


Codec = RawCodec | QuantisedCodec
_CODECS: dict[str, Codec] = {
    "bfloat16": RawCodec(torch.bfloat16),
    "float16": RawCodec(torch.float16),
    "float32": RawCodec(torch.float32),
    "fp8": QuantisedCodec("fp8", 448),
    "int8": QuantisedCodec("int8", 127),
    "int4": QuantisedCodec("int4", 7),
}


def codec(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
        DataError: this version has no codec of that name.
    """
    if name not in _CODECS:
        raise DataError(f"codec '{name}' is not known here; known are {', '.join(_CODECS)}: update moray")
    return _CODECS[name]
