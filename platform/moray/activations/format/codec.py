"""Element types of cached activations: tensors to bytes and back, on whatever device they are.

Arrow has neither bfloat16 nor anything smaller, so values are stored as raw little-endian bytes and the codec is
named in the schema. A codec spends the same number of bytes on every token, which is all that the store needs to
know. `moray.activations.format.schema` draws the bytes.
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
_LARGEST = torch.finfo(torch.float32).max / 2  # leaves a product of elements and scales room to round


@dataclass(frozen=True)
class RawCodec:
    """A floating-point type stored as it is; channels change nothing."""

    dtype: torch.dtype

    def bytes_per_token(self, width: int) -> int:
        """Bytes that one token's `width` values take."""
        return width * self.dtype.itemsize

    def encode(
        self, values: Float[Tensor, "tokens width"], channels: ColumnChannels | None = None
    ) -> UInt8[Tensor, "tokens bytes"]:
        """Values to bytes, on the device they are on. No codec notices what is not finite."""
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def can_hold(self, values: Float[Tensor, "tokens width"]) -> Bool[Tensor, " tokens"]:
        """Tokens whose values are finite, and still are once stored."""
        return torch.isfinite(values.to(self.dtype)).all(dim=1)

    def decode(
        self,
        data: UInt8[Tensor, "tokens bytes"],
        width: int,
        channels: ColumnChannels | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Float[Tensor, "tokens width"]:
        """Bytes to values of the stored type, on the device they are on; no copy if they lie side by side."""
        return data.contiguous().view(-1).view(self.dtype).view(-1, width)


@dataclass(frozen=True)
class QuantisedCodec:
    """A few bits an element, with one scale per token.

    Values are centred and scaled by channel first, for keys have channels that are always large (KIVI, section 3);
    then the largest of a token becomes the largest element. In units of its channel's scale, an integer is wrong by
    half a step at most, that is the token's largest value / (2 * `most`), and an fp8 value by 1/16 of itself at most,
    or half of fp8's smallest number near zero. Beyond 1.7e38 such units values are cut.

    A token whose values are all 0 has the scale 0 and comes back as it was, whatever the channels: that is what a token
    which skips a layer of a sparse target leaves there.
    """

    name: str
    most: int
    """The largest element."""

    def bytes_per_token(self, width: int) -> int:
        """Bytes that one token's `width` values take, its scale included."""
        return codec_bytes(self.name, width)

    def encode(
        self, values: Float[Tensor, "tokens width"], channels: ColumnChannels | None = None
    ) -> UInt8[Tensor, "tokens bytes"]:
        """Values to a scale and elements per token."""
        centred = values.float()
        is_skipped = ~values.any(dim=1, keepdim=True)
        if channels is not None:
            centred = ((centred - channels.offset) / channels.scale).clamp_(-_LARGEST, _LARGEST)
        # A scale that is a normal number even for zeros and subnormal values, so that nothing is divided by zero.
        scale = (centred.abs().amax(dim=1, keepdim=True) / self.most).clamp_(min=_TINY)
        elements = (centred / scale).clamp_(-self.most, self.most).masked_fill_(is_skipped, 0.0)
        return torch.cat([scale.masked_fill(is_skipped, 0.0).view(torch.uint8), self._pack(elements)], dim=1)

    def decode(
        self,
        data: UInt8[Tensor, "tokens bytes"],
        width: int,
        channels: ColumnChannels | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Float[Tensor, "tokens width"]:
        """A scale and elements per token to values of that type."""
        scale = data[:, :SCALE_BYTES].contiguous().view(torch.float32)
        values = self._unpack(data[:, SCALE_BYTES:], width).mul_(scale)
        if channels is not None:
            values = values.mul_(channels.scale).addcmul_(channels.offset, (scale > 0).float())
        return values.to(dtype)

    def can_hold(self, values: Float[Tensor, "tokens width"]) -> Bool[Tensor, " tokens"]:
        """Tokens whose values are finite."""
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
    """The codec of that name.

    Raises:
        DataError: a cache names a codec that this version does not have.
    """
    if name not in _CODECS:
        raise DataError(f"codec '{name}' is not known here; known are {', '.join(_CODECS)}: update moray")
    return _CODECS[name]
