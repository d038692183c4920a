"""`train.precision=auto` takes the faster number format, and says so."""

import pytest
import torch

from moray.cluster.training import precision
from moray.cluster.training.precision import choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("gain", "expected"), [(2.0, "bfloat16"), (1.05, "float32"), (0.6, "float32")])
def test_bfloat16_must_be_clearly_faster(gain, expected, monkeypatch):
    monkeypatch.setattr(precision, "_has_bfloat16_instructions", lambda: True)
    monkeypatch.setattr(precision, "_bfloat16_speedup", lambda: gain)
    name, line = choose_precision(CPU)
    assert name == expected
    assert line.startswith(f"train.precision: {expected} (bfloat16 multiplies {gain:.2f} times as fast")


def test_cpu_speedup_is_measured():
    assert 0.01 < precision._bfloat16_speedup() < 100


@pytest.mark.parametrize(("is_native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_gets_bfloat16_if_it_supports_it(is_native, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native or including_emulation)
    name, line = choose_precision(torch.device("cuda"))
    assert name == expected
    assert line.startswith(f"train.precision: {expected} (")
