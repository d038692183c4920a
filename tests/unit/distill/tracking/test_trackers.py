"""Trackers with real local stores: the figures arrive, a resumed run goes on in the same run, failures stop nothing."""

import json
import threading
import time
from pathlib import Path

import pytest

from moray.config import Config, load_config
from moray.distill.loop import Progress
from moray.distill.tracking import sinks
from moray.distill.tracking.metrics import MetricsWriter, read_learning, read_metrics, read_validation, write_validation
from moray.distill.tracking.sinks import Background, Sink, open_trackers
from moray.distill.tracking.trackers import MlflowConfig, TrackerConfig, WandbConfig, check_trackers
from moray.errors import ConfigError


class Trackers(Config):
    trackers: tuple[TrackerConfig, ...]


def test_mlflow_gets_every_figure_and_a_resumed_run_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from mlflow import MlflowClient

    config = MlflowConfig(type="mlflow", uri="store", experiment="drafters")
    warnings: list[str] = []
    for first_step in (0, 10):
        trackers = open_trackers([config], tmp_path / "run", {"optim": {"lr": 0.1}}, warnings.append)
        writer = MetricsWriter(tmp_path / "run", first_step, trackers)
        writer.write(Progress(first_step + 5, 500, 1.0), {"loss": 2.0 - first_step / 10})
        if first_step:
            write_validation(tmp_path / "run", {"step": 10, "real_tau": 1.5})
        writer.write(Progress(first_step + 10, 1000, 2.0), {"loss": 1.5 - first_step / 10})
        writer.close()
    assert warnings == []
    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("drafters")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"optim.lr": "0.1"}
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(history) == [(5, 2.0), (10, 1.5), (15, 1.0), (20, 0.5)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "validation/real_tau")] == [10]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [5, 10, 15, 20]


def test_mlflow_has_all_parameters_after_a_server_failed_between_two(tmp_path, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.01)
    log_param, calls = MlflowClient.log_param, []

    def fails_once(client, run_id, key, value):
        calls.append(key)
        if len(calls) == 2:
            raise MlflowException("no")
        return log_param(client, run_id, key, value)

    monkeypatch.setattr(MlflowClient, "log_param", fails_once)
    config = MlflowConfig(type="mlflow", uri=str(tmp_path / "store"))
    (tracker,) = open_trackers([config], tmp_path / "run", {"a": 1, "b": 2, "c": 3}, lambda _: None)
    tracker.write(1, {"train/loss": 1.0})
    deadline = time.monotonic() + 30
    while len(calls) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    tracker.close()
    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("moray")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"a": "1", "b": "2", "c": "3"}


def test_wandb_offline_writes_below_the_run_and_keeps_its_id(tmp_path):
    config = WandbConfig(type="wandb", project="drafters", mode="offline")
    warnings: list[str] = []
    for step in (5, 10):
        (tracker,) = open_trackers([config], tmp_path, {"seed": 0}, warnings.append)
        tracker.write(step, {"train/loss": 1.0 / step, "validation/real_tau": 2.0})
        tracker.close()
    assert warnings == []
    (run_id,) = json.loads((tmp_path / "trackers.json").read_text()).values()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    deadline = time.monotonic() + 30  # its own process may still be writing
    while not all(b"train/loss" in path.read_bytes() for path in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_down_is_warned_of_once_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.01)
    config = MlflowConfig(type="mlflow", uri="http://127.0.0.1:9")
    warnings: list[str] = []
    trackers = open_trackers([config], tmp_path, {}, warnings.append)
    writer = MetricsWriter(tmp_path, 0, trackers)
    for step in range(1, 6):
        writer.write(Progress(step, step, 1.0), {"loss": 1.0})
    writer.close()
    assert len(read_metrics(tmp_path)) == 5
    (warning,) = warnings
    assert warning.startswith("mlflow http://127.0.0.1:9 moray fails (MlflowException); training goes on")


def test_what_was_not_taken_at_once_is_written_when_the_tracker_is_back(monkeypatch):
    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.01)
    written, failures, is_done = [], [OSError("no"), OSError("no")], threading.Event()

    class Flaky(Sink):
        def write(self, step, values):
            if failures:
                raise failures.pop()
            written.append((step, values))
            if step == 2:
                is_done.set()

        def close(self):
            written.append("closed")

    warnings: list[str] = []
    tracker = Background("flaky", Flaky, warnings.append)
    tracker.write(1, {"a": 1.0})
    tracker.write(2, {"a": 2.0})
    assert is_done.wait(10)
    tracker.close()
    assert written == [(1, {"a": 1.0}), (2, {"a": 2.0}), "closed"]
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "uri",
    ["https://me:pa55@host/mlflow", "https://tok3n@host", "https://host/?access_token=pa55", "http://h/?sig=pa55"],
)
def test_a_uri_with_credentials_is_refused_without_repeating_it(uri):
    with pytest.raises(
        ConfigError, match=r"'trackers.0.uri': the URI holds credentials.*MLFLOW_TRACKING_TOKEN"
    ) as caught:
        load_config(Trackers, [f"trackers=[{{type: mlflow, uri: '{uri}'}}]"])
    assert "pa55" not in str(caught.value)
    assert "tok3n" not in str(caught.value)


def test_a_key_has_no_place_in_the_configuration():
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(Trackers, ["trackers=[{type: wandb, api_key: x}]"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    check_trackers([WandbConfig(type="wandb"), MlflowConfig(type="mlflow", uri="http://localhost:5000")])
    monkeypatch.setattr(
        "moray.distill.tracking.trackers.find_spec", lambda name: None if name == "sqlalchemy" else name
    )
    with pytest.raises(ConfigError, match=r"kind 'sqlite', which the extra .* pip install mlflow"):
        check_trackers([MlflowConfig(type="mlflow", uri="sqlite:///mlflow.db")])
    with pytest.raises(ConfigError, match="twice"):
        check_trackers([WandbConfig(type="wandb"), WandbConfig(type="wandb")])
    monkeypatch.setattr("moray.distill.tracking.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"names wandb, whose .* pip install 'moray-platform\[wandb\]'"):
        check_trackers([WandbConfig(type="wandb")])


def test_a_checkpoint_that_is_validated_again_keeps_one_row(tmp_path: Path):
    for step, tau in ((20, 2.0), (10, 1.0), (20, 3.0)):
        write_validation(tmp_path, {"step": step, "real_tau": tau})
    assert read_validation(tmp_path) == [{"step": 10, "real_tau": 1.0}, {"step": 20, "real_tau": 3.0}]


def test_a_validated_checkpoint_has_the_cost_of_the_last_report_before_it(tmp_path: Path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (4, 8):
        writer.write(Progress(step=step, tokens=100 * step, seconds=2.0 * step), {"loss": 1.0})
    writer.close()
    for step in (2, 6, 8):
        write_validation(tmp_path, {"step": step, "real_tau": 1.5})
    costs = [{"step": 6, "tokens": 400, "seconds": 8.0}, {"step": 8, "tokens": 800, "seconds": 16.0}]
    assert read_learning(tmp_path) == [{**cost, "real_tau": 1.5} for cost in costs]
