"""How many data shards a run has, and how many workers may share them. Decided before anything starts."""

import os
import sys
from pathlib import Path

import ray

from moray.cluster.training.configs import TrainingConfig
from moray.config import validate
from moray.errors import ConfigError
from moray.provenance import RUN_FILE, read_run_yaml

_READING_CPUS = 0.5
"""Of one task that reads a window: the least that must be free beside the workers, or they wait for ever."""


def run_data_shards(config: TrainingConfig) -> int:
    """The run's number of data shards: workers (the most, where it is a range) times train.gradient_accumulation_steps,
    at its first start.

    `run.yaml` remembers it: later starts may have fewer workers, which take several data shards each.
    """
    folder = Path(config.output).absolute()
    is_begun = (folder / RUN_FILE).is_file()
    first = validate(type(config), read_run_yaml(folder)["config"], notice=False) if is_begun else config
    return first.workers.max_workers * first.train.gradient_accumulation_steps


def num_workers(config: TrainingConfig) -> int | tuple[int, int]:
    """What Ray Train is asked for: `workers.num_workers`, a range cut to what can be of use.

    Raises:
        ConfigError: more workers than data shards, or more than this machine has room for.
    """
    workers, data_shards = config.workers, run_data_shards(config)
    if workers.min_workers > data_shards:
        raise ConfigError(
            f"workers.num_workers is {workers.num_workers}, but the run in '{config.output}' began with {data_shards} "
            f"data shards, which is the most workers it can use: give workers.num_workers={data_shards} or less, or "
            "another output"
        )
    if isinstance(workers.num_workers, int):
        _check_room(config)
        return workers.num_workers
    _check_room(config)
    most = min(workers.max_workers, data_shards, _room(config))
    return (workers.min_workers, most) if workers.min_workers < most else workers.min_workers


def _is_fixed(config: TrainingConfig) -> bool:
    """Whether this machine is all there is: a cluster may grow."""
    return not (config.ray.address or os.environ.get("RAY_ADDRESS"))


def _room(config: TrainingConfig) -> int:
    """Most workers for which there is room, the targets that work beside them included."""
    workers = config.workers
    if not _is_fixed(config):
        return workers.max_workers
    present = ray.cluster_resources()
    fitting = (
        count
        for count in range(workers.max_workers, workers.min_workers, -1)
        if all(amount <= present.get(name, 0) for name, amount in _needs(config, count).items())
    )
    return next(fitting, workers.min_workers)


def _needs(config: TrainingConfig, count: int) -> dict[str, float]:
    """What so many workers take, with what they wait for: targets, or tasks that read."""
    workers = config.workers
    needs = {"CPU": count * workers.cpus_per_worker + _READING_CPUS, "GPU": count * workers.resources.get("GPU", 0.0)}
    if config.source.type != "disk":
        capture = config.source.capture
        targets = capture.num_targets // count * count
        needs["CPU"] += targets * capture.cpus_per_target
        needs["GPU"] += targets * capture.gpus_per_target
    return needs


def _check_room(config: TrainingConfig) -> None:
    """Refuse workers for which this machine has no room: Ray would wait for them for ever. A cluster may grow."""
    workers, present = config.workers, ray.cluster_resources()
    needs = _needs(config, workers.min_workers)
    for name, field in (("GPU", "use_gpu"), ("CPU", "cpus_per_worker")):
        if needs[name] > present.get(name, 0):
            beside = [f"{_READING_CPUS:g} to read with"] if name == "CPU" else []
            if config.source.type != "disk":
                beside.append(f"source.capture.num_targets={config.source.capture.num_targets} beside them")
            including = f", {' and '.join(beside)} included" if beside else ""
            lacking = (
                f"workers.num_workers={workers.num_workers} with workers.{field}={getattr(workers, field)} needs "
                f"{needs[name]:g} {name}s{including}; this {'machine' if _is_fixed(config) else 'cluster'} has "
                f"{present.get(name, 0):g}"
            )
            if _is_fixed(config):
                raise ConfigError(f"{lacking}: lower them or name a cluster in ray.address")
            print(
                f"note: {lacking}, and training waits until it has grown; or stop the run and lower them, or start Ray "
                "with a larger --num-cpus",
                file=sys.stderr,
                flush=True,
            )
