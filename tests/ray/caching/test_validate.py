"""Checkpoints validated beside training: one row each, the last one in any case, also after a kill."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.validate import describe_validation, is_validated
from moray.config import validate
from moray.distill.tracking.metrics import read_metrics, read_validation
from moray.errors import ConfigError, DataError

BLOCK = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}

pytestmark = pytest.mark.usefixtures("ray_session")


def _values(target: Path, cache: Path, output: Path, chats: Path, **validation: Any) -> dict[str, Any]:
    return {
        "target": {"model": str(target)},
        "activations": str(cache),
        "output": str(output),
        "drafter": {
            "type": "moa",
            "layer_self_attention": BLOCK,
            "self_attention": BLOCK,
            "cross_attention": BLOCK,
        },
        "optim": {"type": "muon", "lr": 0.02, "vector_lr": 0.003},
        "schedule": {"type": "linear", "warmup_steps": 3},
        "train": {"epochs": 2, "max_steps": 24, "batch_tokens": 512, "save_steps": 10, "logging_steps": 2},
        "validation": {"chats": str(chats), "max_chats": 2, "max_new_tokens": 8, "depth": 3} | validation,
    }


@pytest.fixture(scope="module")
def validated(
    tiny_target: Path, tiny_cache: Path, chats_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> DistillConfig:
    from moray.cluster.training.distill import distill

    folder = tmp_path_factory.mktemp("run")
    values = _values(tiny_target, tiny_cache, folder / "drafter", chats_file)
    store = {"type": "mlflow", "uri": str(folder / "store")}
    config = validate(DistillConfig, values | {"trackers": [store]})
    distill(config)
    return config


@pytest.mark.slow
def test_every_checkpoint_has_a_row_and_the_last_one_too(validated: DistillConfig) -> None:
    folder = Path(validated.output)
    rows = read_validation(folder)
    assert [row["step"] for row in rows] == [10, 20, 24]
    assert all(row["tau_gap"] == pytest.approx(row["simulated_tau"] - row["real_tau"]) for row in rows)
    tokens = {row["step"]: row["tokens"] for row in read_metrics(folder)}
    assert [row["tokens"] for row in rows] == [tokens[row["step"]] for row in rows]
    line = describe_validation(folder)
    assert line is not None
    assert line.startswith(f"validation, step 24: real tau {rows[-1]['real_tau']:.2f}, simulated ")
    assert [is_validated(validated, step) for step in (10, 15, 20, 24)] == [True, False, True, False]


@pytest.mark.slow
def test_tensorboard_and_mlflow_show_the_same(validated: DistillConfig) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(validated.output)
    rows = [(row["step"], pytest.approx(row["real_tau"])) for row in read_validation(folder)]
    events = EventAccumulator(str(folder / "tensorboard" / "validation"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation/real_tau")] == rows
    client = MlflowClient(tracking_uri=(folder.parent / "store").as_uri())
    (run_id,) = json.loads((folder / "trackers.json").read_text()).values()
    history = client.get_metric_history(run_id, "validation/real_tau")
    assert sorted((metric.step, metric.value) for metric in history) == rows
    losses = client.get_metric_history(run_id, "train/loss")
    assert [metric.step for metric in sorted(losses, key=lambda m: m.step)] == list(range(2, 25, 2))


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_last_validation_makes_up_for_it(
    validated: DistillConfig, tmp_path: Path
) -> None:
    """The training is over, the drafter not yet in place, and Ray knows of nothing that is pending."""
    from moray.cluster.training.distill import distill

    shutil.copytree(validated.output, tmp_path / "drafter")
    path = tmp_path / "drafter" / "validation.jsonl"
    wanted = path.read_text()
    path.write_text("".join(wanted.splitlines(keepends=True)[:2]))
    (tmp_path / "drafter" / "drafter.json").unlink()
    config = validated.model_copy(update={"output": str(tmp_path / "drafter"), "trackers": ()})
    run = yaml.safe_load((tmp_path / "drafter" / "run.yaml").read_text())
    run["config"]["output"] = config.output
    (tmp_path / "drafter" / "run.yaml").write_text(yaml.safe_dump(run))
    distill(config)
    assert path.read_text() == wanted, "the same checkpoint gives the same figures"


def test_chats_that_are_not_there_and_a_machine_too_small_are_refused_before_anything_starts(
    tiny_target: Path, tiny_cache: Path, chats_file: Path, tmp_path: Path
) -> None:
    from moray.cluster.training.distill import distill

    def config(chats: Path = chats_file, **validation: Any) -> DistillConfig:
        return validate(DistillConfig, _values(tiny_target, tiny_cache, tmp_path / "run", chats, **validation))

    with pytest.raises((ConfigError, DataError), match=r"nowhere\.jsonl"):
        distill(config(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"validation.cpus=3.5 beside the workers' 1 CPUs .*every_checkpoints=null"):
        distill(config(cpus=3.5))
    with pytest.raises(ConfigError, match=r"validation.gpus=1 beside the workers' 0 GPUs"):
        distill(config(gpus=1.0))
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_only_the_last_checkpoint_once_the_workers_have_gone(
    tiny_target: Path, tiny_cache: Path, chats_file: Path, tmp_path: Path
) -> None:
    """All CPUs of the machine: beside the worker there would be no room."""
    from moray.cluster.training.distill import distill

    values = _values(tiny_target, tiny_cache, tmp_path / "run", chats_file, every_checkpoints=None, cpus=4.0)
    values["train"] |= {"max_steps": 4}
    distill(validate(DistillConfig, values))
    assert [row["step"] for row in read_validation(tmp_path / "run")] == [4]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_after_a_kill_every_checkpoint_is_validated(
    tiny_target: Path, tiny_cache: Path, chats_file: Path, tmp_path: Path, start_pipeline: Callable[..., Any]
) -> None:
    """Killed while a validation runs or waits: Ray Train takes up what was pending when the run goes on."""
    values = _values(tiny_target, tiny_cache, tmp_path / "run", chats_file, max_chats=16, max_new_tokens=64)
    values["train"] |= {"max_steps": 60, "epochs": 8, "batch_tokens": 256, "save_steps": 20}
    path = tmp_path / "distill.yaml"
    path.write_text(yaml.safe_dump(values))
    first = start_pipeline("distill", str(path))
    snapshot = tmp_path / "run" / "ray" / "train" / "checkpoint_manager_snapshot.json"
    first.kill_when(lambda: _pending(snapshot) > 0)
    assert not (tmp_path / "run" / "drafter.json").exists()
    again = start_pipeline("distill", str(path))
    assert again.finish() == 0, again.output
    assert [row["step"] for row in read_validation(tmp_path / "run")] == [20, 40, 60]
    assert "validation, step 60: real tau " in again.output


def _pending(snapshot: Path) -> int:
    try:
        return len(json.loads(snapshot.read_text())["pending_validation_specs"])
    except (OSError, ValueError):
        return 0
