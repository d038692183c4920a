"""How memory crosses the network: as it is, rounded to bfloat16, or quantised with one scale per token or group.

    codec      bytes per element    a tensor [tokens, width] becomes
    float32    4                    itself
    bfloat16   2                    itself, rounded
    int8       1                    int8 [tokens, width], and one float16 scale per token
    int4       0.5                  two values per byte, and one float16 scale per 32 values

Only what the drafter reads is rounded, so a lossy codec can lower tau, and never changes a token.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from moray.edge.messages import CodecName
from moray.errors import DataError

BYTES: Mapping[CodecName, float] = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}
"""Bytes that one value takes, without the scales per token of int8."""
_GROUP = 32
"""Values that share a scale in int4."""
_SCALES = ".scales"
_TINY = 1e-6


def encode(codec: CodecName, memory: Mapping[str, Float[Tensor, "tokens width"]]) -> dict[str, Tensor]:
    """The tensors that are sent for some memory; int4 needs an even width."""
    if codec in ("float32", "bfloat16"):
        return {name: rows.to(getattr(torch, codec)) for name, rows in memory.items()}
    sent: dict[str, Tensor] = {}
    for name, rows in memory.items():
        values, scales = _quantised(rows.float(), codec)
        sent |= {name: values, name + _SCALES: scales}
    return sent


def decode(
    codec: CodecName, tensors: Mapping[str, Tensor], lengths: Mapping[str, int], num_tokens: int, dtype: torch.dtype
) -> dict[str, Float[Tensor, "tokens width"]]:
    """The memory that was sent, in `dtype`.

    Args:
        codec: how it was encoded.
        tensors: of the frame.
        lengths: number of tokens of those tensors, by name, that do not have `num_tokens`.
        num_tokens: of all others.
        dtype: of the result.

    Raises:
        DataError: the tensors are not what `encode` returns for so many tokens.
    """
    names = [name for name in tensors if not name.endswith(_SCALES)]
    memory: dict[str, Tensor] = {}
    for name in names:
        expected = lengths.get(name, num_tokens)
        rows = tensors[name]
        if codec in ("int8", "int4"):
            scales = tensors.get(name + _SCALES)
            if scales is None:
                raise DataError(f"memory '{name}' came without scales, which codec {codec} needs")
            rows = _restored(name, rows, scales, codec)
        if rows.dim() != 2 or rows.shape[0] != expected:
            raise DataError(f"memory '{name}' has the shape {list(rows.shape)}; {expected} rows are needed")
        memory[name] = rows.to(dtype)
    return memory


def _quantised(rows: Tensor, codec: CodecName) -> tuple[Tensor, Tensor]:
    if codec == "int8":
        scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=_TINY) / 127
        return (rows / scales).round().to(torch.int8), scales.half()
    tokens, width = rows.shape
    grouped = torch.nn.functional.pad(rows, (0, -width % _GROUP)).view(tokens, -1, _GROUP)
    scales = grouped.abs().amax(dim=2, keepdim=True).clamp(min=_TINY) / 7
    values = (grouped / scales).round().to(torch.int8).view(tokens, -1)[:, :width] + 8  # 1 to 15
    pairs = values.view(tokens, -1, 2).to(torch.uint8)
    return pairs[..., 0] * 16 + pairs[..., 1], scales.view(tokens, -1).half()


def _restored(name: str, values: Tensor, scales: Tensor, codec: CodecName) -> Tensor:
    try:
        if codec == "int8":
            return values.float() * scales.float()
        tokens = values.shape[0]
        numbers = torch.stack([values // 16, values % 16], dim=-1).view(tokens, -1).float() - 8
        return numbers * scales.float().repeat_interleave(_GROUP, dim=1)[:, : numbers.shape[1]]
    except (RuntimeError, IndexError) as error:
        raise DataError(f"memory '{name}' has scales that do not belong to it: {error}") from None
