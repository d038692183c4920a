"""Costs are measured several times, and only once where the machine is too busy for more."""

import pytest
import torch

from moray.decoding.planning import measuring


@pytest.mark.parametrize(("max_seconds", "num_runs"), [(60.0, 6), (0.0, 2)])
def test_a_busy_machine_delays_the_start_by_a_limited_time(monkeypatch, max_seconds, num_runs):
    monkeypatch.setattr(measuring, "_MAX_SECONDS", max_seconds)
    calls = [0, 0]

    def run(size: int) -> None:
        calls[size] += 1

    seconds = measuring._fastest([lambda: run(0), lambda: run(1)], torch.device("cpu"))
    assert calls == [num_runs, num_runs]
    assert all(0 <= one < float("inf") for one in seconds)
