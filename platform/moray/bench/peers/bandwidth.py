"""What this machine's memory moves, as a measure of plain decoding: a step reads every weight once.

A copy reads and writes; reading alone may be somewhat faster, so this is a yardstick and no strict limit.
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
    """Bytes of the weights that a plain step reads: all but an embedding that is not also lm_head, of which it reads a
    row."""
    import math

    from moray.targets.stored import stored_tensors

    size = {"float32": 4, "bfloat16": 2}[dtype]
    stored = stored_tensors(folder)
    unread = {"model.embed_tokens.weight"} if "lm_head.weight" in stored else set[str]()
    return sum(size * math.prod(tensor.shape) for name, tensor in stored.items() if name not in unread)
