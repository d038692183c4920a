"""Replaces `train.precision=auto` by a number format, which then belongs to the run like any other setting."""

from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from moray.cluster.errors import own_errors
from moray.cluster.training.configs import TrainingConfig
from moray.cluster.training.resume import with_recorded_precision
from moray.distill.precision import choose_precision

_Config = TypeVar("_Config", bound=TrainingConfig)


def resolve_precision(config: _Config) -> _Config:
    """The configuration with an explicit precision: the one that the run in `config.output` began with, or the faster
    one, measured once with the resources of a worker. Needs a Ray session."""
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
