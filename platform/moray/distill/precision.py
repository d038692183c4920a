"""Chooses the number format of the forward pass for `train.precision=auto`."""

import time
from statistics import median

import torch

_SIZE = 1024
"""Rows, inputs and outputs of the products that are timed; those of training have sizes of this order."""
_ROUNDS = 5
_GAIN = 1.1
"""How many times as fast bfloat16 must be: below that, float32 is the more exact one for the same time."""


def choose_precision(device: torch.device) -> tuple[str, str]:
    """The faster of float32 and bfloat16 on this device, with the current number of threads.

    CPUs without bfloat16 instructions, and some with them, multiply float32 faster.

    Returns:
        the value for `train.precision`, and one line for the log.
    """
    if device.type != "cpu":
        has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if has_bfloat16 else "float32"
        return name, f"train.precision: {name}, for the GPU has {'' if has_bfloat16 else 'no '}bfloat16"
    gain = _gain_of_bfloat16()
    name = "bfloat16" if gain >= _GAIN else "float32"
    return name, f"train.precision: {name}; products in bfloat16 are {gain:.2f} times as fast as in float32 here"


@torch.no_grad()
def _gain_of_bfloat16() -> float:
    """Seconds of a product in float32 over those in bfloat16, taken in turns."""
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    operands = {dtype: torch.ones(_SIZE, _SIZE, dtype=dtype) for dtype in seconds}
    for _ in range(_ROUNDS + 1):
        for dtype, operand in operands.items():
            begin = time.perf_counter()
            torch.nn.functional.linear(operand, operand)
            seconds[dtype].append(time.perf_counter() - begin)
    float32, bfloat16 = (median(values[1:]) for values in seconds.values())  # the first call prepares kernels
    return float32 / bfloat16
