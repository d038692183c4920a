"""Replaces `train.precision=auto` by a number format, which then belongs to the run like any other setting."""

import time
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import ray
import torch

from moray.cluster.errors import own_errors
from moray.cluster.training.configs import TrainingConfig
from moray.cluster.training.resume import with_recorded_precision

_SIZE = 1024
"""Side of the square matrices that are timed, in elements; matrices in training are about this large."""
_ROUNDS = 5
_MIN_SPEEDUP = 1.1
"""Below this speed-up float32 is kept, because it is more accurate."""
_Config = TypeVar("_Config", bound=TrainingConfig)


def resolve_precision(config: _Config) -> _Config:
    """The configuration with an explicit precision: the one that the run in `config.output` began with, or the faster
    one, measured once with the resources of a worker. Needs a Ray session
    that has them."""
    config = with_recorded_precision(config)
    if config.train.precision != "auto":
        return config
    workers = config.workers
    task: Any = ray.remote(_measure).options(
        num_cpus=workers.cpus_per_worker,
        num_gpus=workers.gpus_per_worker if workers.use_gpu else 0,
        scheduling_strategy="DEFAULT",  # in a trial of a sweep, outside of what Tune reserved for it
    )
    with own_errors():
        found: Any = ray.get(task.remote(workers.threads_per_worker, workers.use_gpu))
    name, reason = found
    print(f"{Path(config.output).name}: {reason}")
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": name})})


def _measure(num_threads: int, use_gpu: bool) -> tuple[str, str]:
    torch.set_num_threads(num_threads)
    return choose_precision(torch.device("cuda" if use_gpu else "cpu"))


def choose_precision(device: torch.device) -> tuple[str, str]:
    """Choose between float32 and bfloat16.

    A GPU gets bfloat16 if it supports it natively. A CPU gets it only if a matrix multiplication, timed with the
    current number of threads, is faster in it: many CPUs are slower in bfloat16, even some with instructions for it.

    Returns:
        the value for `train.precision`, and one line for the log.
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "train.precision: bfloat16 (the GPU supports it)"
        return "float32", "train.precision: float32 (the GPU has no native bfloat16)"
    if not _has_bfloat16_instructions():
        return "float32", "train.precision: float32 (this CPU has no bfloat16 instructions)"
    speedup = _bfloat16_speedup()
    name = "bfloat16" if speedup >= _MIN_SPEEDUP else "float32"
    return name, f"train.precision: {name} (bfloat16 multiplies {speedup:.2f} times as fast as float32 on this CPU)"


def _has_bfloat16_instructions() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def _bfloat16_speedup() -> float:
    """How many times as fast as in float32 a matrix multiplication is: medians of calls in turns."""
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    operands = {dtype: torch.ones(_SIZE, _SIZE, dtype=dtype) for dtype in seconds}
    for _ in range(_ROUNDS + 1):
        for dtype, operand in operands.items():
            begin = time.perf_counter()
            torch.nn.functional.linear(operand, operand)
            seconds[dtype].append(time.perf_counter() - begin)
    float32, bfloat16 = (median(values[1:]) for values in seconds.values())  # the first call prepares kernels
    return float32 / bfloat16
