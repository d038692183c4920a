"""Whose folder a sweep's output is while it runs."""

from pathlib import Path

import pytest

from moray.errors import ConfigError
from sweeps.tuning.claim import alone, running_clock, seconds_run
from sweeps.tuning.folders import trial_folder


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
