"""Windows of the cache read (or made) ahead of a training worker, by plain Ray tasks and actors.

The trainer waits in Ray's C++, without the GIL. A Ray Data pipeline would run its executor as a thread of the trainer,
where it polls while windows wait to be asked for, and takes the GIL from the training step (docs/notebook.md).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moray.activations.format.manifest import Manifest
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import needed_columns
from moray.activations.reading.epochs import Window
from moray.batch import TapNeeds
from moray.cluster.training.live import LiveTargets, LiveWindows
from moray.cluster.training.windows import read_window

_READ_CPUS = 0.5

Ask = Callable[[Window], "ray.ObjectRef[pa.Table]"]


def tables_ahead(
    uri: str,
    manifest: Manifest,
    needs: TapNeeds,
    windows: Sequence[Window],
    prefetch: int,
    targets: LiveTargets | None = None,
) -> Iterator[pa.Table]:
    """One table per window, in their order, with the needed columns alone; the next `prefetch` are under way meanwhile.

    Tables are views into the object store, which holds each for as long as one of its rows is held.

    Args:
        uri: the cache.
        manifest: of the cache.
        needs: taps that are read.
        windows: all that will be asked for.
        prefetch: how many windows may be under way, or wait unread.
        targets: make the windows in place of reading them.

    Raises:
        RayError: a window cannot be read or made.
    """
    columns = needed_columns(needs, manifest.columns)
    if targets is not None and _needs_targets(uri, windows, targets):
        ask = _makers(uri, needs, columns, targets, len(windows))
    else:
        ask = _readers(uri, columns)
    waiting: deque[ray.ObjectRef[pa.Table]] = deque()
    for window in windows:
        waiting.append(ask(window))
        if len(waiting) > prefetch:
            yield ray.get(waiting.popleft())
    while waiting:
        yield ray.get(waiting.popleft())


def _readers(uri: str, columns: list[str]) -> Ask:
    """Tasks, on the trainer's own node where there is room: a window need not cross the network twice."""
    here: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    task: Any = ray.remote(num_cpus=_READ_CPUS, scheduling_strategy=here)(read_window)
    return lambda window: task.remote(window.row_groups, uri, columns)


def _makers(uri: str, needs: TapNeeds, columns: list[str], targets: LiveTargets, num_windows: int) -> Ask:
    """Target replicas that take turns. One that dies is started again, and its windows are made again."""
    capture = targets.source.capture
    kind: Any = ray.remote(
        num_cpus=capture.cpus_per_target, num_gpus=capture.gpus_per_target, max_restarts=-1, max_task_retries=-1
    )(LiveWindows)
    settings = targets.settings(uri, needs, columns)
    replicas = [kind.remote(settings) for _ in range(min(targets.num_targets, num_windows))]
    turns = cycle(replicas)
    return lambda window: next(turns).window.remote(window.row_groups)


def _needs_targets(uri: str, windows: Sequence[Window], targets: LiveTargets) -> bool:
    """Whether anything must be made: what a hybrid run has written once is read."""
    if targets.source.type == "stream":
        return True
    written = {name.removesuffix(".json") for name in CacheStore(uri).names("shards", ".json")}
    return any(shard not in written for window in windows for shard, _ in window.row_groups)
