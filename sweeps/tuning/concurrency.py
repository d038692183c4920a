"""How many trials have room at the same time, where each trains in workers of its own."""

import os
from typing import Protocol

import ray

from moray.cluster.configs import RayConfig
from moray.cluster.training.configs import TrainingConfig
from moray.cluster.training.data_shards import num_workers
from moray.errors import ConfigError
from sweeps.tuning.tuner import WAITING_CPUS

_READING_CPUS = 0.5
"""CPUs of the tasks that read data for trials; without this reserve beside the workers, all would wait forever."""


class ConcurrentSweep(Protocol):
    """What a sweep says about its trials."""

    max_concurrent: int | None
    ray: RayConfig


def concurrent_trials(config: TrainingConfig, sweep: ConcurrentSweep, section: str, cpus: float, gpus: float) -> int:
    """The number of trials that run at the same time: as many as fit; on a single machine, limited by its cores.

    Args:
        config: the training of a trial.
        sweep: limits the number, and may have a cluster of its own.
        section: section of the configuration with the CPUs and GPUs of a measurement.
        cpus: logical CPUs of a measurement.
        gpus: GPUs of a measurement.

    Raises:
        ConfigError: there is no room for the workers of one trial, or for a measurement.
    """
    num_workers(config)
    workers = config.workers
    present = ray.cluster_resources()
    for name, field, asked in (("CPU", "cpus", cpus), ("GPU", "gpus", gpus)):
        if asked > present.get(name, 0.0):
            raise ConfigError(
                f"{section}.{field} is {asked:g}; there are {present.get(name, 0.0):g} {name}s, and a measurement "
                "would wait forever: give less"
            )
    rooms = [(present.get("CPU", 1.0) - _READING_CPUS) / (workers.max_workers * workers.cpus_per_worker + WAITING_CPUS)]
    if workers.use_gpu:
        rooms.append(present.get("GPU", 0.0) / (workers.max_workers * workers.gpus_per_worker))
    elif not (config.ray.address or sweep.ray.address or os.environ.get("RAY_ADDRESS")):
        rooms.append((os.cpu_count() or 1) / (workers.max_workers * workers.threads_per_worker))
    most = max(1, int(min(rooms)))
    return min(most, sweep.max_concurrent or most)
