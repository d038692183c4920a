"""Element types: every codec gives back what fits into it, bit for bit, and says how much room it takes."""

import numpy as np
import pytest
import torch

from moray.activations.codec import codec
from moray.errors import DataError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_decode_to_the_values_rounded_once(name: str) -> None:
    values = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)) * 100
    data = codec(name).encode(values)
    assert data.shape == (7, codec(name).bytes_per_token(12))
    decoded = codec(name).decode(data.reshape(-1).numpy(), 12)
    assert decoded.dtype == DTYPES[name]
    assert torch.equal(decoded, values.to(DTYPES[name]))


def test_bytes_are_little_endian_elements_in_order() -> None:
    data = codec("float16").encode(torch.tensor([[1.0, -2.0], [0.5, 65504.0]])).numpy()
    assert np.frombuffer(data.tobytes(), dtype="<f2").tolist() == [1.0, -2.0, 0.5, 65504.0]


def test_values_in_a_strided_view_are_encoded_in_their_own_order() -> None:
    values = torch.arange(12.0).view(3, 4).t()
    decoded = codec("float32").decode(codec("float32").encode(values).reshape(-1).numpy(), 3)
    assert torch.equal(decoded, values)


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"codec 'int4' is not known here; known are bfloat16, float16, float32"):
        codec("int4")
