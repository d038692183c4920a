"""Loads a tensor-parallel target: starts the followers, loads this process's own part, and leads.

The followers use the next devices of this process: on GPUs cuda:1, cuda:2 and so on, which Ray gives to a worker that
asks for as many.
"""

import os
import tempfile
import weakref
from pathlib import Path

import torch

from moray.errors import ConfigError
from moray.targets.model import rank_device
from moray.targets.parallel.group import RankGroup
from moray.targets.parallel.plan import plan_ranks
from moray.targets.parallel.processes import Followers
from moray.targets.parallel.target import ParallelTarget
from moray.targets.parallel.weights import connect, load_part
from moray.targets.spec import TargetConfig, read_spec

_NCCL = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""With the first, waiting for a tensor waits for the other GPUs too, so that a lost rank is an error and no hang. The
second would read the file by which ranks find each other, which is gone once they are connected."""


def load_parallel(config: TargetConfig, *, packs: bool) -> ParallelTarget:
    """Load a target over `config.tensor_parallel` processes, of which this one is the first.

    On a CPU its threads are divided among them.

    Raises:
        ConfigError: there are too few GPUs, the target cannot be split like that or is sparse, or its weights are
            wrong.
    """
    spec = read_spec(config.model)
    num_ranks = config.tensor_parallel
    if spec.routing is not None:
        raise ConfigError(
            f"target.tensor_parallel is {num_ranks}, but '{config.model}' is a sparse target, which runs in one "
            "process: give 1"
        )
    plans, device = plan_ranks(spec, num_ranks), rank_device(config, 0)
    threads = before = torch.get_num_threads()
    if device.type == "cpu":
        threads = max(1, before // num_ranks)
        torch.set_num_threads(threads)
    if device.type == "cuda":
        os.environ.update(_NCCL)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the ranks share a machine: others cannot connect
    with tempfile.TemporaryDirectory(prefix="moray-ranks-") as folder:
        followers = Followers(config, Path(folder), threads)
        try:
            model = load_part(config, plans[0], device)
            followers.wait_until_ready()
            group = RankGroup(Path(folder), 0, num_ranks, device)
            connect(model, group)
            group.barrier()
            target = ParallelTarget(model, spec, config, plans, group, followers, packs=packs)
        except BaseException:
            followers.end()
            torch.set_num_threads(before)
            raise
    weakref.finalize(target, _end, followers, before)
    return target


def _end(followers: Followers, threads: int) -> None:
    followers.end()
    torch.set_num_threads(threads)
