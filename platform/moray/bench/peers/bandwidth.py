"""What this machine's memory can deliver: the limit of decoding one token after another.

A plain step reads every weight once, so that tokens per second are at most bytes per second over the weights' bytes.
"""

import time
from pathlib import Path

_BYTES = 256 << 20
"""Of each buffer: far more than any cache holds."""
_REPETITIONS = 9


def copy_bandwidth(threads: int) -> float:
    """Bytes per second, read and written together, of the fastest of several copies from memory to memory."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source, destination = torch.ones(_BYTES // 4), torch.zeros(_BYTES // 4)
        seconds = []
        for _ in range(_REPETITIONS):
            begin = time.perf_counter()
            destination.copy_(source)
            seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return 2 * _BYTES / min(seconds)


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a target's weights in a number format; an embedding that is also lm_head counts once."""
    import math

    from moray.targets.stored import stored_tensors

    size = {"float32": 4, "bfloat16": 2}[dtype]
    return sum(size * math.prod(tensor.shape) for tensor in stored_tensors(folder).values())
