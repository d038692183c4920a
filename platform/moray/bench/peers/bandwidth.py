"""Measures memory bandwidth as a yardstick for plain decoding, in which each step reads every weight once.

A copy both reads and writes. Reading alone may be somewhat faster, so this is a yardstick and not a strict limit.
"""

import time
from pathlib import Path

_BYTES = 256 << 20
"""Size of each buffer, far larger than any CPU cache."""
_REPETITIONS = 9


def copy_bandwidth(threads: int) -> float:
    """Bytes per second, reads plus writes, of the fastest of several memory-to-memory copies."""
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
    """Bytes of weights that a plain step reads: all except an embedding that is not tied to lm_head, because a step
    reads only one row of it."""
    import math

    from moray.targets.stored import stored_tensors

    size = {"float32": 4, "bfloat16": 2}[dtype]
    stored = stored_tensors(folder)
    unread = {"model.embed_tokens.weight"} if "lm_head.weight" in stored else set[str]()
    return sum(size * math.prod(tensor.shape) for name, tensor in stored.items() if name not in unread)
