"""Whose folder a sweep's output is while it runs."""

from pathlib import Path

import pytest

from moray.config import Config
from moray.errors import ConfigError, MismatchError
from moray.provenance import write_json_atomically
from sweeps.tuning.folders import trial_folder
from sweeps.tuning.resume import (
    SUMMARY_FILE,
    alone,
    begin_or_resume_sweep,
    is_done,
    is_worked_on,
    running_clock,
    seconds_run,
)


def test_one_process_at_a_time_works_on_a_sweep(tmp_path: Path) -> None:
    with alone(tmp_path / "sweep"):
        with pytest.raises(ConfigError, match="another process works on the sweep"), alone(tmp_path / "sweep"):
            pass
        with alone(tmp_path / "other"):
            pass
    with alone(tmp_path / "sweep"):
        pass


def test_a_trial_that_failed_keeps_what_further_training_needs(tmp_path: Path) -> None:
    """It is tried again, whatever Tune says of its process."""
    for state, is_kept in (("failed", True), ("diverged", False)):
        folder = trial_folder(str(tmp_path), {"x": state})
        folder.begin({"x": state})
        (folder.path / "ray").mkdir()
        folder.end(state)
        folder.end("stopped")
        assert (folder.state, (folder.path / "ray").is_dir()) == (state, is_kept)


def test_the_clock_goes_on_from_where_it_was(tmp_path: Path) -> None:
    with running_clock(tmp_path):
        pass
    first = seconds_run(tmp_path)
    with running_clock(tmp_path):
        pass
    assert seconds_run(tmp_path) > first > 0


class Sweep(Config):
    """As much of a sweep as its folder must tell from others."""

    objective: str = "tau"
    space: list[int]
    output: str
    max_failures: int = 2


def _finish(sweep: Sweep) -> None:
    folder = Path(sweep.output)
    with alone(folder):
        begin_or_resume_sweep(folder, sweep, {})
        write_json_atomically(folder / SUMMARY_FILE, {"config": sweep.model_dump(mode="json")})


def test_what_is_done_stays_done_wherever_and_however(tmp_path: Path) -> None:
    sweep = Sweep(space=[1, 2], output=str(tmp_path / "a"))
    assert not is_done(tmp_path / "a", sweep, dict, resume=False)
    _finish(sweep)
    assert is_done(tmp_path / "a", sweep, dict, resume=False)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = sweep.model_copy(update={"output": str(tmp_path / "b"), "max_failures": 5})
    assert is_done(tmp_path / "b", moved, dict, resume=False)
    trial_folder(moved.output, {"x": 1}).begin({"x": 1})
    trial_folder(moved.output, {"x": 1}).end("failed")
    assert is_done(tmp_path / "b", moved, dict, resume=False)
    assert not is_done(tmp_path / "b", moved, dict, resume=True), "what failed is tried again"


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    sweep = Sweep(space=[1, 2], output=str(tmp_path))
    with alone(tmp_path):
        begin_or_resume_sweep(tmp_path, sweep, {})
        assert is_worked_on(tmp_path)
        with pytest.raises(ConfigError, match="another process works on the sweep"):
            is_done(tmp_path, sweep, dict, resume=True)
    assert not is_worked_on(tmp_path)
    with pytest.raises(ConfigError, match="a sweep that is not finished: add --resume to continue it"):
        is_done(tmp_path, sweep, dict, resume=False)
    assert not is_done(tmp_path, sweep, dict, resume=True)
    _finish(sweep)
    wider = sweep.model_copy(update={"space": [1, 2, 3]})
    with pytest.raises(ConfigError, match="a finished sweep with another space: add --resume to try what is new"):
        is_done(tmp_path, wider, dict, resume=False)
    assert not is_done(tmp_path, wider, dict, resume=True)
    with pytest.raises(MismatchError, match="objective"):
        is_done(tmp_path, sweep.model_copy(update={"objective": "speedup"}), dict, resume=True)
    with pytest.raises(MismatchError, match="objective"):
        begin_or_resume_sweep(tmp_path, sweep.model_copy(update={"objective": "speedup"}), {})
