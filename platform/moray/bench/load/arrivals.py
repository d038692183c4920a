"""Arrival times of requests, with the same interval distribution as `vllm bench serve`."""

import random

from moray.bench.load.config import LevelConfig


def arrival_times(level: LevelConfig, count: int, seed: int) -> list[float]:
    """Seconds from the start of a round at which each request is due; deterministic for a given seed.

    Intervals are gamma distributed with mean 1 / rate and shape `burstiness`; shape 1 is a Poisson process. Without a
    rate, all requests are due at once.
    """
    if level.request_rate is None:
        return [0.0] * count
    rng = random.Random(seed)
    scale = 1 / (level.request_rate * level.burstiness)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(level.burstiness, scale)
    return times
