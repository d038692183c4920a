"""How memory crosses: exact codecs change nothing, the others little; what is damaged is refused."""

import pytest
import torch

from moray.decoding.remote.frames import pack_frame, unpack_frame
from moray.edge.codec import decode, encode
from moray.edge.messages import Cancel
from moray.errors import DataError


def crossed(codec, memory, dtype=torch.float32):
    _, tensors = unpack_frame(pack_frame(Cancel(), encode(codec, memory)))
    return decode(codec, tensors, {}, next(iter(memory.values())).shape[0], dtype)


def memory(width: int = 70) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"cross": torch.randn(9, width) * 3, "tail": torch.randn(9, 2 * width)}


@pytest.mark.parametrize(("codec", "error"), [("float32", 0.0), ("bfloat16", 0.004), ("int8", 0.005), ("int4", 0.08)])
def test_the_error_is_that_of_the_number_of_bits(codec, error):
    sent = memory()
    for name, rows in crossed(codec, sent).items():
        assert rows.shape == sent[name].shape
        worst = float((rows - sent[name]).abs().max() / sent[name].abs().max())
        assert worst <= error
    bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}[codec]
    size = sum(tensor.nbytes for tensor in encode(codec, sent).values()) * 8 / sum(t.numel() for t in sent.values())
    assert bits <= size < bits * 1.35


def test_a_token_without_any_value_is_zero():
    zeros = {"feature": torch.zeros(3, 8)}
    for codec in ("int8", "int4"):
        assert torch.equal(crossed(codec, zeros)["feature"], zeros["feature"])


def test_a_drafter_without_memory_sends_none():
    assert encode("int8", {}) == {}
    assert decode("int8", {}, {}, 5, torch.float32) == {}


@pytest.mark.parametrize("codec", ["float32", "int8", "int4"])
def test_damaged_memory_is_refused(codec):
    tensors = encode(codec, memory(64))
    with pytest.raises(DataError, match="10 rows"):
        decode(codec, tensors, {}, 10, torch.float32)
    if codec != "float32":
        for damaged in (
            {name: rows for name, rows in tensors.items() if not name.endswith(".scales")},
            {name: rows[:, :0] if name.endswith(".scales") else rows for name, rows in tensors.items()},
        ):
            with pytest.raises(DataError, match=r"scales|rows"):
                decode(codec, damaged, {}, 9, torch.float32)
