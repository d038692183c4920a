"""A follower: it holds its part of a target and does what the leader says, until the leader ends.

    python -m moray.targets.parallel.follower < settings.json

It is started by `moray.targets.parallel.processes`, never by hand. It writes one line: "ready", or what is wrong.
Whatever libraries print goes to standard error.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moray.config import Config
from moray.errors import MorayError, RankError
from moray.targets.kernels.kinds import Kernels
from moray.targets.model import rank_device, read_eos_ids
from moray.targets.parallel.caches import Splittable, new_part
from moray.targets.parallel.group import Command, RankGroup
from moray.targets.parallel.plan import RankPlan, plan_ranks
from moray.targets.parallel.target import RankTarget, collect, gather_logits
from moray.targets.parallel.weights import connect, load_part
from moray.targets.spec import TargetConfig, read_spec


class FollowerSettings(Config):
    """What a follower is told at its start."""

    target: TargetConfig
    """The whole target."""
    rank: int
    """Its rank, from 1 on."""
    folder: str
    """Where the ranks find each other."""
    threads: int
    """Threads to compute with."""


@dataclass
class Follower:
    """A rank's part of the target and of all caches."""

    target: RankTarget
    plans: Sequence[RankPlan]
    group: RankGroup

    def __post_init__(self) -> None:
        self._caches: dict[int, Splittable] = {}

    @torch.inference_mode()
    def follow(self) -> None:
        """Do what the leader says, for ever.

        Raises:
            RankError: the leader, or another rank, has ended.
        """
        while True:
            command = self.group.receive()
            for queued in command["queued"]:
                self._do(queued)
            self._do(command)

    def _do(self, command: Command) -> None:
        match command["do"]:
            case "cache":
                self._caches[command["cache"]] = new_part(self.target, command["kind"], command["args"])
            case "forget":
                self._caches.pop(command["cache"], None)
            case "call":
                self._call(command)
            case "collect":
                part = self._caches[command["cache"]]
                collect(self.group, self.plans, self._call(command), part.gathered_methods[command["method"]])
            case "forward":
                self._forward(command)
            case "logits":
                gather_logits(self.target, self.group, self.plans, self._shared(command["shape"], self.target.dtype))
            case "kernels":
                self.target.pack_part(Kernels(command["packed_from"], "", compiled_up_to=command["compiled_up_to"]))
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _call(self, command: Command) -> Any:
        part, name = self._caches[command["cache"]], command["method"]
        if name not in part.replayed_methods and name not in part.gathered_methods:
            raise ValueError(f"unknown method {name!r} of a cache")
        method = getattr(part, name)
        return method(*command["args"], **command["kwargs"])

    def _forward(self, command: Command) -> None:
        shape = command["shape"]
        hidden = self._shared(shape, self.target.dtype)
        positions = self._shared(shape[:2], torch.long)
        mask = None
        if command["mask"] is not None:
            mask_shape, dtype = command["mask"]
            mask = self._shared(mask_shape, getattr(torch, dtype))
        cache: Any = self._caches[command["cache"]]
        self.target.run_layers(hidden, positions, mask, cache)

    def _shared(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.group.broadcast(torch.empty(tuple(shape), dtype=dtype, device=self.target.device))


def run(settings: FollowerSettings, say: Callable[[str], None]) -> None:
    """Load this rank's part, say so, and follow.

    Raises:
        ConfigError: the part cannot be loaded.
    """
    torch.set_num_threads(settings.threads)
    config, rank = settings.target, settings.rank
    spec = read_spec(config.model, needs_weights=False)
    plans = plan_ranks(spec, config.tensor_parallel)
    device = rank_device(config, rank)
    model = load_part(config, plans[rank], device)
    say("ready")
    group = RankGroup(Path(settings.folder), rank, config.tensor_parallel, device)
    connect(model, group)
    group.barrier()
    Follower(RankTarget(model, spec, config, read_eos_ids(config.model), plans[rank]), plans, group).follow()


def _end_with_the_leader() -> None:
    """The leader never closes this pipe while it lives."""
    while os.read(0, 1):
        pass
    os._exit(0)


def main() -> None:
    """Read the settings and follow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader, which may still need its followers
    settings = FollowerSettings.model_validate(json.loads(sys.stdin.readline()))
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_leader, daemon=True).start()
    code = 1
    try:
        run(settings, lambda line: print(line, file=answers))
    except RankError:
        pass
    except MorayError as error:
        print(error, file=answers)
        code = error.exit_code
    except Exception:  # noqa: BLE001 - said here, because the process ends without Python's own report
        traceback.print_exc()
    os._exit(code)  # an ordinary end would wait for the thread that reads


if __name__ == "__main__":
    main()
