"""`train.precision=auto` takes the faster number format, and says so."""

import pytest
import torch

from moray.distill import precision
from moray.distill.precision import choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("gain", "expected"), [(2.0, "bfloat16"), (1.05, "float32"), (0.6, "float32")])
def test_bfloat16_must_be_clearly_faster(gain, expected, monkeypatch):
    monkeypatch.setattr(precision, "_gain_of_bfloat16", lambda: gain)
    name, line = choose_precision(CPU)
    assert name == expected
    assert line == f"train.precision: {expected}; products in bfloat16 are {gain:.2f} times as fast as in float32 here"


def test_the_products_of_this_machine_are_timed():
    name, line = choose_precision(CPU)
    gain = float(line.split(" are ")[1].split()[0])
    assert gain > 0
    assert name == ("bfloat16" if gain >= 1.1 else "float32") or gain == pytest.approx(1.1, abs=0.01)
