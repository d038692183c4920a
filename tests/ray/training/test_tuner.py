"""What Ray Tune is asked to do for trials that climb a ladder: stop the worse ones, try dead ones again, propose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.tuning.configs import OptunaSearch
from sweeps.tuning.folders import trial_folder, trial_folders
from sweeps.tuning.spaces import Range
from sweeps.tuning.tuner import Plan, optuna_searcher, tune_listed, tune_proposed

SIZES = [1, 2, 4]

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    """A plan of trials whose objective is their choice `x` on every rung, one at a time."""
    output = str(tmp_path)

    def make(before: Callable[[dict[str, Any], int], None] = lambda choices, size: None, **values: Any) -> Plan:
        def run(choices: dict[str, Any]) -> None:
            from ray import tune

            folder = trial_folder(output, choices)
            folder.begin(choices)
            for rung, size in enumerate(SIZES):
                before(choices, size)
                folder.add({"rung": rung, "objective": choices["x"]})
                if size == SIZES[-1]:
                    folder.end("finished")
                tune.report({"objective": choices["x"], "size": size})

        settings: dict[str, Any] = {"reduction": 2, "concurrent": 1, "max_failures": 0, "reuse": True}
        return Plan(output=output, run=run, size_key="size", sizes=SIZES, **(settings | values))

    return make


def _ends(folder: Path) -> dict[Any, tuple[str | None, int]]:
    """How each trial ended and how many rungs it came to, by its choice."""
    return {one.record["choices"]["x"]: (one.state, len(one.rows)) for one in trial_folders(str(folder))}


def test_asha_stops_what_is_worse_than_others_were(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    tune_listed(make_plan(), [{"x": x} for x in (3, 2, 1, 4)])
    assert _ends(tmp_path) == {3: ("finished", 3), 2: ("stopped", 1), 1: ("stopped", 1), 4: ("finished", 3)}


def test_without_a_reduction_nothing_is_stopped(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    tune_listed(make_plan(reduction=None), [{"x": x} for x in (3, 1)])
    assert _ends(tmp_path) == {3: ("finished", 3), 1: ("finished", 3)}


def test_a_trial_whose_process_dies_is_tried_again_so_often(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"

    def before(choices: dict[str, Any], size: int) -> None:
        import os
        import signal

        died = len(deaths.read_text()) if deaths.is_file() else 0
        if size == SIZES[1] and (choices["x"] == 2 or not died):
            deaths.write_text("x" * (died + 1))
            os.kill(os.getpid(), signal.SIGKILL)

    tune_listed(make_plan(before, reduction=None, max_failures=1, reuse=False), [{"x": x} for x in (1, 2)])
    assert _ends(tmp_path) == {1: ("finished", 3), 2: ("failed", 1)}
    assert trial_folder(str(tmp_path), {"x": 2}).record["message"]
    assert len(deaths.read_text()) == 3  # once, and then as often as a trial is tried


def test_optuna_proposes_from_lists_and_ranges(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    space = {"x": Range(type="uniform", low=0.5, high=2.0), "list": [[3, 4], [5, 15]]}
    searcher = optuna_searcher(OptunaSearch(type="optuna", num_trials=3, num_random=2), space, [])
    tune_proposed(make_plan(reduction=None), space, 3, searcher)
    chosen = [one.record["choices"] for one in trial_folders(str(tmp_path))]
    assert len(chosen) == 3
    assert all(0.5 <= choices["x"] <= 2 and choices["list"] in space["list"] for choices in chosen)
