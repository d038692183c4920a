"""Ctrl-C and kill -9 of a sweep's driver, and of its trials' processes: what was measured stays, and the sweep ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from tiny_sweeps import write_distill, write_questions

from moray.config import validate
from moray.errors import MismatchError
from moray.provenance import read_json
from sweeps.trainings.configs import SweepConfig

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def config(tiny_target: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep on two rungs; its space and its output are missing."""
    folder = tmp_path_factory.mktemp("config")
    distill = write_distill(folder, tiny_target, tiny_cache, epochs=8, save_steps=10, logging_steps=5)
    questions = write_questions(folder, "one", "two six")
    decoding = {"tree": {"type": "chain", "depth": 3}, "questions": str(questions)}
    sweep = {
        "distill": [str(distill)],
        "ladder": {"rungs": 2, "reduction": 2},
        "training_tokens": 40 * 512,
        "objective": "tau",
        "decoding": decoding | {"max_new_tokens": 12},
        "confirm": {"finalists": 1, "seeds": 1},
        "max_concurrent": 2,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return folder / "sweep.yaml"


def _measured(output: Path) -> dict[str, list[dict[str, Any]]]:
    """What lies in the folders of the trials, by trial."""
    return {path.parent.name: read_json(path) for path in output.glob("trials/*/rungs.json")}


def _count(output: Path) -> int:
    return sum(map(len, _measured(output).values()))


def _end(run: Any, how: str, ready: Callable[[], bool]) -> None:
    """End a run's driver by Ctrl-C or kill -9, and wait until all that works for it has gone."""
    if how == "kill":
        run.kill_when(ready)
        return
    run.wait_until(ready)
    run.interrupt()
    assert run.finish() == 130, run.output
    assert "interrupted: the same command with --resume continues" in run.output
    run.wait_until_gone(60, but=("DashboardAgent", "RuntimeEnvAgent"))


@pytest.mark.parametrize("how", ["kill", "Ctrl-C"])
def test_a_sweep_outlives_its_driver_and_its_trials_processes(
    how: str, config: Path, start_pipeline: Callable[..., Any], kill: Callable[[int], None], tmp_path: Path
) -> None:
    """The first run loses its driver and leaves no answer, the second loses its trials and writes it."""
    output = tmp_path / "sweep"
    layers, seeds = [0, 1], 1 if how == "kill" else 2
    more = (f"space={{drafter.target_layers: {layers}}}", f"confirm.seeds={seeds}")
    words = ("sweeps.tune", str(config), f"output={output}", "ray.num_cpus=4", *more)
    _end(start_pipeline(*words), how, lambda: _count(output) >= 1)
    assert not (output / "summary.json").exists()
    before = _measured(output)
    second = start_pipeline(*words, "--resume")
    second.wait_until(lambda: second.processes("ray::ImplicitFunc"))
    living = second.processes("ray::ImplicitFunc")
    for pid in living:
        kill(pid)
    assert living
    assert second.finish() == 0, second.output
    after = _measured(output)
    for name, rows in before.items():
        assert after[name][: len(rows)] == rows
    summary = read_json(output / "summary.json")
    assert {trial["state"] for trial in summary["trials"]} <= {"finished", "stopped"}
    assert len(summary["trials"]) == len(layers) + seeds - 1
    assert {trial["choices"]["drafter.target_layers"] for trial in summary["trials"]} == {*layers}
    assert len(summary["sure"]["finalists"][0]["seeds"]) == seeds
    _check_answer(output, summary)
    _check_that_it_is_finished(config, output, layers, seeds)


def _check_answer(output: Path, summary: dict[str, Any]) -> None:
    """The winner has the highest tau of those that came to the end, and its drafter is the best one."""
    finished = [trial for trial in summary["trials"] if trial["state"] == "finished"]
    best = max(finished, key=lambda trial: trial["figures"]["objective"])
    assert summary["winner"]["choices"] == best["choices"]
    assert summary["training_tokens"] == sum(trial["training_tokens"] for trial in summary["trials"])
    rows = pd.read_parquet(output / "sweep.parquet")
    assert {*rows["step"]} == {20, 40}
    assert (rows["tau"] >= 1).all()
    assert rows["lossless"].all()
    assert (rows["objective"] == rows["tau"]).all()
    for name in ("drafter.json", "drafter.safetensors"):
        assert (output / "best" / name).read_bytes() == (Path(best["folder"]) / name).read_bytes()


def _check_that_it_is_finished(config: Path, output: Path, layers: list[int], seeds: int) -> None:
    """The same command measures nothing again; another setting is refused."""
    from sweeps.trainings.run import is_complete

    settings = yaml.safe_load(config.read_text())
    settings |= {"output": str(output), "space": {"drafter.target_layers": layers}}
    settings["confirm"] |= {"seeds": seeds}
    sweep = validate(SweepConfig, settings)
    assert is_complete(sweep)
    assert is_complete(sweep.model_copy(update={"max_concurrent": 1}))
    with pytest.raises(MismatchError, match="training_tokens"):
        is_complete(sweep.model_copy(update={"training_tokens": 100}))
