"""Runs the target over a few planned batches before the first shard: measures channels, hidden-state RMS and speed."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moray.activations.capture.extract import TapEncoder, find_channels
from moray.activations.format.channels import Channels, quantised_columns
from moray.activations.format.schema import CacheConfig
from moray.activations.planning.shards import ShardPlan, only_columns, tap_columns
from moray.targets.model import Target

NUM_BATCHES = 4
_NUM_TIMED = 2


def calibration_batches(shards: Sequence[ShardPlan]) -> list[ShardPlan]:
    """Select a few planned batches, evenly spaced so that they include short and long chats of many parts."""
    batches = [ShardPlan(plan.part, plan.name, [batch]) for plan in shards for batch in plan.batches]
    count = min(NUM_BATCHES, len(batches))
    return [batches[(2 * index + 1) * len(batches) // (2 * count)] for index in range(count)]


@dataclass(frozen=True)
class CalibrationPass:
    """Measurements from the calibration batches."""

    channels: Channels
    """Channels of the quantised columns."""
    tokens_per_second: float
    """Speed of one target, encoding included."""
    hidden_rms: dict[str, float]
    """Root mean square of the hidden states, by column."""


def calibrate(
    target: Target, config: CacheConfig, batches: Sequence[Sequence[np.ndarray]], channels: Channels | None = None
) -> CalibrationPass:
    """Measure channels, hidden-state RMS and speed by running one target over a few batches.

    Args:
        target: target that will fill the cache.
        config: what the cache stores.
        batches: token ids of the chats of each batch.
        channels: channels that the cache already has, if any; missing ones are measured.

    Raises:
        DataError: the target produced a value that is not finite.
    """
    known = channels or {}
    quantised = quantised_columns(tap_columns(target.spec, config))
    missing = [name for name in quantised if name not in known]
    found = find_channels(target, only_columns(config, missing), batches) if missing else {}
    channels = {name: found[name] if name in found else known[name] for name in quantised}
    encoder = TapEncoder(target, config, channels)
    squares: dict[str, float] = {}
    for tokens in batches:  # also warms up
        for name, value in encoder.encode(tokens)[2].items():
            squares[name] = squares.get(name, 0.0) + value
    total = sum(len(ids) for tokens in batches for ids in tokens)
    _wait(target)
    begin = time.perf_counter()
    for tokens in batches[-_NUM_TIMED:]:
        encoder.encode(tokens)
    _wait(target)
    num_tokens = sum(len(ids) for tokens in batches[-_NUM_TIMED:] for ids in tokens)
    speed = num_tokens / (time.perf_counter() - begin)
    return CalibrationPass(channels, speed, {name: math.sqrt(value / total) for name, value in squares.items()})


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
