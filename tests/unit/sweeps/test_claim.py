"""Whose folder a sweep's output is while it runs."""

from pathlib import Path

import pytest

from moray.errors import ConfigError
from sweeps.tuning.claim import running_clock, seconds_run


def test_one_process_at_a_time_works_on_a_sweep(tmp_path: Path) -> None:
    with running_clock(tmp_path / "sweep"):
        with pytest.raises(ConfigError, match="another process works on the sweep"), running_clock(tmp_path / "sweep"):
            pass
        with running_clock(tmp_path / "other"):
            pass
    with running_clock(tmp_path / "sweep"):
        pass


def test_the_clock_goes_on_from_where_it_was(tmp_path: Path) -> None:
    with running_clock(tmp_path):
        pass
    first = seconds_run(tmp_path)
    with running_clock(tmp_path):
        pass
    assert seconds_run(tmp_path) > first > 0
