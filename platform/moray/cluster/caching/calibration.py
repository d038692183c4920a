"""Runs the calibration pass of a cache on Ray: one target runs a few batches before the first shard is written."""

from collections.abc import Sequence
from typing import Any, cast

import ray

from moray.activations.capture.calibration import calibrate, calibration_batches
from moray.activations.format.channels import CHANNELS_FILE, quantised_columns, read_known_channels, write_channels
from moray.activations.format.records import Record
from moray.activations.format.schema import CacheConfig
from moray.activations.format.store import CacheStore
from moray.activations.planning.cache_spec import CachePlan, CacheSpec
from moray.activations.planning.shards import ShardPlan
from moray.cluster.caching.configs import CaptureConfig
from moray.cluster.lost_ranks import exit_on_lost_rank
from moray.progress import Progress
from moray.targets.spec import TargetConfig

CALIBRATION_FILE = "calibration.json"
_OLD_FILE = "rehearsal.json"
"""Name of the calibration file before version 0.2."""


def forget_calibration(store: CacheStore) -> None:
    """Delete the result of the calibration pass, which describes other columns or another cache."""
    for name in (CALIBRATION_FILE, _OLD_FILE):
        store.delete(name)


class CalibrationRecord(Record):
    """calibration.json: the target's speed and hidden-state RMS on a few batches."""

    tokens_per_second: float
    """Speed of one target, encoding included."""
    hidden_rms: dict[str, float]
    """Root mean square of the hidden states, by column."""


def calibration(store: CacheStore, wanted: CacheSpec, planned: CachePlan, capture: CaptureConfig) -> CalibrationRecord:
    """Return the target's speed and hidden-state RMS, measured once per cache with `calibrate_on_ray`."""
    file = next((name for name in (CALIBRATION_FILE, _OLD_FILE) if store.exists(name)), None)
    if file is not None and (not quantised_columns(wanted.columns) or store.exists(CHANNELS_FILE)):
        return store.read_record(file, CalibrationRecord)
    with Progress("run the target on a few batches, to know its speed and its values"):
        calibrated = calibrate_on_ray(store, wanted.target, wanted.cache, capture, planned.shards)
    store.write_json(CALIBRATION_FILE, calibrated.values)
    return calibrated


def calibrate_on_ray(
    store: CacheStore, target: TargetConfig, cache: CacheConfig, capture: CaptureConfig, shards: Sequence[ShardPlan]
) -> CalibrationRecord:
    """Run one target on a few batches; measure and store the channels that the cache's quantised columns still lack.

    Raises:
        DataError: the target produced a value that is not finite.
    """
    batches = calibration_batches(shards)
    task = ray.remote(num_cpus=capture.cpus_per_target, num_gpus=capture.gpus_per_target, max_retries=1)(_calibrate)
    return cast(Any, ray.get(cast(Any, task).remote(store, target, cache, batches, capture.threads_per_target)))


def _calibrate(
    store: CacheStore, target: TargetConfig, cache: CacheConfig, batches: list[ShardPlan], threads: int
) -> CalibrationRecord:
    import torch

    from moray.activations.capture.extract import token_arrays
    from moray.targets.model import Target

    torch.set_num_threads(threads)
    loaded = Target.load(target, packs=False)
    tokens = []
    for plan in batches:
        tokens.append(token_arrays(store.read_table(f"tokens/{plan.part}.parquet").take(plan.batches[0])))
    known = read_known_channels(store)
    with exit_on_lost_rank():
        result = calibrate(loaded, cache, tokens, known)
    if result.channels.keys() - known.keys():
        write_channels(store, {**known, **result.channels})
    return CalibrationRecord(tokens_per_second=result.tokens_per_second, hidden_rms=result.hidden_rms)
