"""No thread that computes while a replica is constructed outlives it: its OpenMP workers would slow decoding down."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moray.config import validate
from moray.decoding.engine.engine import Engine
from moray.targets.head import TargetHead
from moray.targets.model import Target
from serve.config import ServeConfig
from serve.drafter import DrafterReplica
from serve.loading_thread import run_in_ending_thread
from serve.target import TargetReplica

THREADS = Path("/proc/self/task")


def threads() -> set[str]:
    return {thread.name for thread in THREADS.iterdir()}


def compute() -> set[str]:
    """Run a parallel loop; returns the process's threads while its workers exist."""
    torch.ones(1 << 20).exp_()
    return threads()


@pytest.mark.skipif("OpenMP not found" in torch.__config__.parallel_info(), reason="torch without OpenMP")
@pytest.mark.skipif(not THREADS.is_dir(), reason="counts threads as Linux does")
def test_the_workers_end_with_the_thread():
    configured = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = threads()
        new = run_in_ending_thread(compute) - before
        assert len(new) >= 2
        deadline = time.monotonic() + 10
        while new & threads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        torch.set_num_threads(configured)


def test_an_error_is_raised_where_the_function_was_called_for():
    with pytest.raises(ZeroDivisionError):
        run_in_ending_thread(lambda: 1 / 0)


def test_replicas_load_and_measure_in_threads_that_have_ended(chat_target, monkeypatch):
    computed: dict[str, list[threading.Thread]] = defaultdict(list)

    def note(owner: type, name: str) -> None:
        real: Callable[..., object] = getattr(owner, name)

        def noting(*args: object, **settings: object) -> object:
            computed[f"{owner.__name__}.{name}"].append(threading.current_thread())
            return real(*args, **settings)

        monkeypatch.setattr(owner, name, staticmethod(noting) if name == "load" else noting)

    note(Target, "load")
    note(Engine, "measure_costs")
    note(TargetHead, "load")
    model = str(chat_target)
    values = {
        "target": {"model": model, "device": "cpu"},
        "drafters": {"twin": {"type": "pretrained", "model": model}},
        "engine": {"tree": {"type": "chain", "depth": 3}},
    }
    config = validate(ServeConfig, values)
    TargetReplica(config)
    DrafterReplica(config, "127.0.0.1").close()
    assert computed.keys() == {"Target.load", "Engine.measure_costs", "TargetHead.load"}
    assert len(computed["Target.load"]) == 3  # the target, and the drafter once in each replica
    assert not any(thread.is_alive() for noted in computed.values() for thread in noted)
