"""Where a run's metrics go besides its own files: TensorBoard, MLflow, Weights & Biases.

A tracker that fails must not stop or slow a run. Each has its own thread, which warns once, tries again and, if the run
ends before it succeeds, gives up. The ids of a run's trackers are stored in trackers.json, so that a resumed run
continues the same MLflow or Weights & Biases run.
"""

import os
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moray.config import flatten
from moray.distill.tracking.trackers import MlflowConfig, WandbConfig
from moray.provenance import read_json, write_json_atomically

TRACKERS_FILE = "trackers.json"
RETRY_SECONDS = 30.0
CLOSE_SECONDS = 60.0

Warn = Callable[[str], None]


class Sink(ABC):
    """Receives named metrics of finished updates."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics, named "train/..." or "validation/...", of the update `step`."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still buffered."""


class TensorBoard(Sink):
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class Background(Sink):
    """A sink behind a queue, with its own thread."""

    def __init__(self, label: str, open_sink: Callable[[], Sink], warn: Warn) -> None:
        """
        Args:
            label: names it in warnings.
            open_sink: called in the thread, repeatedly until it succeeds.
            warn: called at most once.
        """
        self._label = label
        self._open = open_sink
        self._warn = warn
        self._has_warned = False
        self._closing = threading.Event()
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._queue.put((step, dict(values)))

    def close(self) -> None:
        """Wait for the queue to empty, but not forever: a server that is down gets one more try."""
        self._queue.put(None)
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        sink: Sink | None = None
        while True:
            item = self._queue.get()
            while True:
                is_last_try = self._closing.is_set()
                try:
                    sink = sink or self._open()
                    if item is None:
                        sink.close()
                        return
                    sink.write(*item)
                    break
                except Exception as error:  # noqa: BLE001 - trackers fail in their own ways; training must not
                    self._complain(error)
                    if is_last_try:
                        return
                    self._closing.wait(RETRY_SECONDS)

    def _complain(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            # Only the error's type: its text may contain addresses and keys.
            self._warn(f"{self._label} fails ({type(error).__name__}); training goes on, and it is tried again")


class _Mlflow(Sink):
    """One MLflow run."""

    def __init__(self, config: MlflowConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        # Notice within seconds that a server is down; allow a folder as the store.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=_located(config.uri))
        run_id = _read_state(folder).get(config.label)
        if run_id is None:
            experiment = self._client.get_experiment_by_name(config.experiment)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
            )
            run = self._client.create_run(experiment_id, run_name=config.name or folder.name)
            run_id = run.info.run_id
            _write_state(folder, config.label, run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id: str = run_id
        known = self._client.get_run(run_id).data.params  # all of them, unless the server failed halfway
        for key, value in flatten(dict(settings)).items():
            if key not in known:
                self._client.log_param(run_id, key, str(value)[:500])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _Wandb(Sink):
    """One Weights & Biases run. Steps are metrics of their own, because validation arrives late."""

    def __init__(self, config: WandbConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        state = _read_state(folder)
        run_id = state.get(config.label) or uuid.uuid4().hex[:8]
        _write_state(folder, config.label, run_id)  # before the run is created, so that a kill cannot lead to two runs
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            id=run_id,
            resume="allow",
            mode=config.mode,
            dir=str(folder),
            name=config.name or folder.name,
            config=dict(settings),
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,  # host, user and command line
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
                init_timeout=30,
            ),
        )
        for group in ("train", "validation"):
            self._run.define_metric(f"{group}/step")
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for group in ("train", "validation"):
            own = {name: value for name, value in values.items() if name.startswith(f"{group}/")}
            if own:
                self._run.log({f"{group}/step": step, **own})

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    trackers: Iterable[MlflowConfig | WandbConfig], folder: Path, settings: Mapping[str, Any], warn: Warn
) -> list[Sink]:
    """Start the trackers of the run in `folder`, or resume them.

    Args:
        trackers: their configurations.
        folder: of the run; stores their ids.
        settings: of the run, for comparing runs.
        warn: called once by each tracker that fails.
    """

    def opener(config: MlflowConfig | WandbConfig) -> Callable[[], Sink]:
        if isinstance(config, MlflowConfig):
            return lambda: _Mlflow(config, folder, settings)
        return lambda: _Wandb(config, folder, settings)

    return [Background(config.label, opener(config), warn) for config in trackers]


def _located(uri: str | None) -> str | None:
    """A folder's path as a URI, which MLflow understands in any working directory; other URIs are unchanged."""
    return Path(uri).absolute().as_uri() if uri is not None and uri != "databricks" and ":" not in uri else uri


_state_lock = threading.Lock()


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / TRACKERS_FILE
    return read_json(path) if path.is_file() else {}


def _write_state(folder: Path, label: str, value: Any) -> None:
    with _state_lock:  # each tracker has its own thread
        write_json_atomically(folder / TRACKERS_FILE, _read_state(folder) | {label: value})
