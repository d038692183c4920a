"""Messages as bytes: JSON for numbers and names, raw memory for tensors, no pickle.

frame    | lengths of the next two, 4 bytes each | message, JSON | tensors' names and sizes, JSON | tensors |
"""

import json
import math
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from moray.config import AnyConfig, Config
from moray.errors import DataError

MAX_FRAME = 1 << 30
"""Bytes; a prompt of 100,000 tokens with 8 KiB of memory each fits."""
_LENGTHS = struct.Struct(">II")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
}


def pack_frame(message: Config, tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Build one frame, from tensors on any device."""
    joined = {name: tensor.cpu().contiguous() for name, tensor in (tensors or {}).items()}
    sizes = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in joined.items()]
    words, table = message.model_dump_json(exclude_defaults=True).encode(), json.dumps(sizes).encode()
    bodies = [bytes(tensor.view(torch.uint8).numpy().data) for tensor in joined.values() if tensor.numel()]
    return b"".join([_LENGTHS.pack(len(words), len(table)), words, table, *bodies])


def unpack_frame(frame: bytes | bytearray) -> tuple[bytes, dict[str, Tensor]]:
    """The message of a frame, as JSON, and its tensors.

    Raises:
        DataError: it is no frame.
    """
    try:
        num_words, num_table = _LENGTHS.unpack_from(frame)
        table = _LENGTHS.size + num_words
        at = table + num_table
        tensors = {}
        for name, dtype, shape in json.loads(bytes(frame[table:at])):
            count = math.prod(shape) * _DTYPES[dtype].itemsize
            if at + count > len(frame) or min(shape) < 0:
                raise ValueError("cut short")
            body = bytearray(memoryview(frame)[at : at + count])
            at += count
            flat = torch.frombuffer(body, dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
            tensors[str(name)] = flat.view(_DTYPES[dtype]).view(shape)
        return bytes(frame[_LENGTHS.size : table]), tensors
    except (ValueError, KeyError, TypeError, struct.error, RecursionError, RuntimeError) as error:
        raise DataError(f"a message between target and drafter is damaged: {error}") from None


def validated(kind: type[AnyConfig], words: bytes) -> AnyConfig:
    """Read a message.

    Raises:
        DataError: it is not one of this kind.
    """
    try:
        return kind.model_validate_json(words)
    except ValueError as error:
        raise DataError(f"a message between target and drafter is damaged: {str(error)[:200]}") from None
