"""Costs are measured several times, and only once where the machine is too busy for more."""

from types import SimpleNamespace

import pytest
import torch

from moray.decoding.planning import measuring


@pytest.mark.parametrize(
    ("seconds_of_a_run", "num_runs"),
    [
        pytest.param(1.0, (6, 6), id="idle"),
        pytest.param(12.0, (4, 4), id="busy: the limit passes between two turns"),
        pytest.param(25.0, (3, 2), id="busy: the limit passes within a turn"),
        pytest.param(100.0, (2, 2), id="so busy that every size is timed once"),
    ],
)
def test_a_busy_machine_delays_the_start_by_a_limited_time(monkeypatch, seconds_of_a_run, num_runs):
    now, calls = [0.0], [0, 0]
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(size: int) -> None:
        calls[size] += 1
        now[0] += seconds_of_a_run

    seconds = measuring._fastest([lambda: run(0), lambda: run(1)], torch.device("cpu"))
    assert tuple(calls) == num_runs
    assert seconds == [seconds_of_a_run] * 2
