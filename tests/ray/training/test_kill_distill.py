"""kill -9 of the driver, of a worker and of Ray Train's controller, and other numbers of workers: the weights end as
those of an unbroken run; bit for bit where the number of workers is the same."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moray.distill.tracking.metrics import read_metrics

CHECKPOINT_STEPS = 10
MAX_STEPS = 60
BLOCK = {"num_heads": 2, "num_kv_heads": 2, "intermediate_size": 64}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def arguments(tiny_target: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two workers, six checkpoints; only the output is missing."""
    config = {
        "target": {"model": str(tiny_target)},
        "activations": str(tiny_cache),
        "drafter": {
            "type": "moa",
            "target_layers": 1,
            "layer_self_attention": BLOCK,
            "self_attention": BLOCK,
            "cross_attention": BLOCK,
        },
        "optim": {"type": "muon", "lr": 0.02, "vector_lr": 0.003},
        "schedule": {"type": "linear", "warmup_steps": 5},
        "train": {
            "epochs": 20,
            "max_steps": MAX_STEPS,
            "batch_tokens": 256,
            "save_steps": CHECKPOINT_STEPS,
            "logging_steps": 5,
        },
        "workers": {"num_workers": 2},
    }
    path = tmp_path_factory.mktemp("config") / "distill.yaml"
    path.write_text(yaml.safe_dump(config))
    return [str(path)]


@pytest.fixture(scope="module")
def unbroken(
    arguments: list[str], start_pipeline: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An undisturbed run."""
    output = tmp_path_factory.mktemp("unbroken") / "drafter"
    run = start_pipeline("distill", *arguments, f"output={output}")
    assert run.finish() == 0, run.output
    lines = [line for line in run.output.splitlines() if line.strip()]
    assert lines[-1] == f"drafter: {output}"
    own = ("start Ray: ", "distill moa: ")  # on a slow machine Ray takes long enough to be reported
    assert all(line.startswith(own) for line in lines[:-1]), f"more than progress and result:\n{run.output}"
    assert f"{MAX_STEPS} of {MAX_STEPS} updates" in lines[-2]
    assert _starts(output) == [0]
    return output


def _digest(output: Path) -> str:
    return hashlib.sha256((output / "drafter.safetensors").read_bytes()).hexdigest()


def _has_logged(output: Path, step: int) -> Callable[[], bool]:
    return lambda: any(row["step"] >= step for row in read_metrics(output))


def _half_way(output: Path) -> Callable[[], bool]:
    """Two checkpoints are written and more is still to come."""
    return _has_logged(output, 2 * CHECKPOINT_STEPS + 5)


def _starts(output: Path) -> list[int]:
    """The step at which each start of training began: TensorBoard has a file for each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    starts = []
    for path in sorted((output / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        events = EventAccumulator(str(path))
        events.Reload()
        starts.append(events.Scalars("train/loss")[0].step - 5)
    return starts


def _rows(output: Path) -> list[dict[str, float]]:
    rows = read_metrics(output)
    assert [row["step"] for row in rows] == list(range(5, MAX_STEPS + 1, 5))
    spent = [row.pop("seconds") for row in rows]
    assert spent == sorted(spent), "time goes on where it was"
    assert all(row.pop("peak_memory_bytes") > 1e7 for row in rows)
    return rows


@pytest.mark.parametrize("controller", ["lives", pytest.param("dies", marks=pytest.mark.soak)])
def test_after_kills_of_the_driver_a_worker_and_the_controller_the_weights_are_the_same(
    controller: str,
    arguments: list[str],
    unbroken: Path,
    start_pipeline: Callable[..., Any],
    kill: Callable[[int], None],
    tmp_path: Path,
) -> None:
    """The same command goes on after the driver's death, and by itself after the others'. It has room for one group of
    workers: what the dead controller had reserved must be given back."""
    output = tmp_path / "drafter"
    start_pipeline("distill", *arguments, f"output={output}").kill_when(_half_way(output))
    assert not (output / "drafter.safetensors").exists()
    again = start_pipeline("distill", *arguments, f"output={output}", "ray.num_cpus=3")
    again.wait_until(_has_logged(output, 3 * CHECKPOINT_STEPS + 5))
    workers = again.processes("RayTrainWorker")
    assert len(workers) == 2, workers
    kill(max(workers))
    if controller == "dies":
        again.wait_until(_has_logged(output, 4 * CHECKPOINT_STEPS + 5))
        kill(*again.processes("TrainController"))
    assert again.finish() == 0, again.output
    first, *later = _starts(output)
    assert first == 0
    assert all(start % CHECKPOINT_STEPS == 0 for start in later)
    for start, checkpoints in zip(later, (2, 3, 4)[: 3 if controller == "dies" else 2], strict=True):
        assert checkpoints * CHECKPOINT_STEPS <= start < MAX_STEPS, "it began anew instead of going on"
    assert _rows(output) == _rows(unbroken)
    assert _digest(output) == _digest(unbroken)

    third = start_pipeline("distill", *arguments, f"output={output}")
    assert third.finish() == 0
    assert third.output.strip() == f"{output} is complete for this configuration: nothing to do"


@pytest.mark.soak
def test_a_run_goes_on_with_fewer_workers_to_the_same_weights(
    arguments: list[str], unbroken: Path, start_pipeline: Callable[..., Any], tmp_path: Path
) -> None:
    """Both data shards on one worker: the same updates at the same rates on the same chats, but for the order of
    sums."""
    output = tmp_path / "drafter"
    first = start_pipeline("distill", *arguments, f"output={output}", "workers.num_workers=[1, 2]")
    first.kill_when(_half_way(output))
    again = start_pipeline("distill", *arguments, f"output={output}", "workers.num_workers=1")
    assert again.finish() == 0, again.output
    assert _starts(output)[1] >= 2 * CHECKPOINT_STEPS, "it began anew instead of going on"
    _check_close(output, unbroken)


@pytest.mark.soak
def test_accumulation_on_one_worker_trains_as_two_workers_do(
    arguments: list[str], unbroken: Path, start_pipeline: Callable[..., Any], tmp_path: Path
) -> None:
    """Two data shards from the first start on; killed half-way it goes on with two workers."""
    output = tmp_path / "drafter"
    more = [*arguments, f"output={output}", "train.gradient_accumulation_steps=2"]
    start_pipeline("distill", *more, "workers.num_workers=1").kill_when(_half_way(output))
    again = start_pipeline("distill", *more, "workers.num_workers=2")
    assert again.finish() == 0, again.output
    _check_close(output, unbroken)


def _check_close(output: Path, unbroken: Path) -> None:
    for row, wanted in zip(_rows(output), _rows(unbroken), strict=True):
        assert [row[key] for key in ("step", "tokens", "positions", "learning_rate", "padding_waste")] == [
            wanted[key] for key in ("step", "tokens", "positions", "learning_rate", "padding_waste")
        ]
        assert row["loss"] == pytest.approx(wanted["loss"], rel=0.02)
    got, wanted_weights = (load_file(folder / "drafter.safetensors") for folder in (output, unbroken))
    for name, value in wanted_weights.items():
        torch.testing.assert_close(got[name], value, rtol=0.05, atol=0.01, msg=name)
