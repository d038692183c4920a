"""Sweeps side by side: finished ones, unfinished ones, and folders that are none."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from sweep_trials import GRID, LAYERS, RATE, RUNGS, WIDTH, a_grid, finalist, summary, trial, write_trials

from moray.errors import DataError
from moray.provenance import write_json_atomically
from sweeps.reports.overview import overview, print_overviews
from sweeps.reports.views import SearchTrials, common_rung, height, read_space, searched, worths
from sweeps.summarize import COMMAND, main
from sweeps.tuning.spaces import Range

RANGE = {"type": "loguniform", "low": 1e-4, "high": 1.0}


def write_run(output: Path, space: dict[str, Any] = GRID, search: dict[str, Any] | None = None) -> None:
    """The beginning of a sweep: its run.yaml."""
    config = {
        "distill": ["a.yaml"], "space": space, "objective": "speedup", "search": search or {"type": "grid"},
        "ladder": {"rungs": 3, "reduction": 3, "stop": True},
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    (output / "run.yaml").write_text(yaml.safe_dump({"config": config}, sort_keys=False))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    trials, output = a_grid(), tmp_path / "done"
    write_run(output)
    write_trials([*trials, trial({**trials[0].choices, "train.seed": 1}, [1.9])], output)
    finalists = [finalist("first [1]", [2.0, 2.2], [2.1, 2.4]), finalist("second", [1.0, 1.2], [1.1, 1.4])]
    write_json_atomically(output / "summary.json", summary(trials, finalists, GRID))
    write_json_atomically(output / "clock.json", {"seconds": 4000.0})
    return output


def printed(*folders: Path, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    print_overviews([overview(str(folder)) for folder in folders], console)
    return console.export_text()


def test_a_finished_sweep_names_its_winner_and_how_sure(finished):
    found = overview(str(finished))
    assert found["complete"]
    assert (found["winner"]["name"], found["runner_up"]["name"]) == ("first [1]", "second")
    assert found["sure"]["stays_ahead"] == 1.0
    assert found["num_trials"] == 10
    assert found["training_tokens"] == sum(one.training_tokens for one in a_grid()) + RUNGS[0] - 7
    line = next(line for line in printed(finished).splitlines() if "first [1]" in line)
    assert found["winner"]["objective"] == pytest.approx(2.17, abs=0.005)
    for cell in ("first [1]: 2.17 (2.10 to 2.24)", "speedup", "100 %", " 10 ", "1:06:40"):
        assert cell in line
    assert "not finished" not in printed(finished)


def test_a_lead_that_may_be_chance_has_a_mark(finished):
    close = [finalist("one", [1.0, 1.6], [1.3, 1.1]), finalist("other", [1.3, 1.1], [1.0, 1.59])]
    write_json_atomically(finished / "summary.json", summary(a_grid(), close, GRID))
    assert " % ?" in printed(finished)
    write_json_atomically(finished / "summary.json", summary(a_grid(), close[:1], GRID))
    assert overview(str(finished))["runner_up"] is None
    assert "%" not in printed(finished)


def test_an_unfinished_sweep_says_how_far_it_is(tmp_path, finished):
    half = tmp_path / "half"
    write_run(half)
    trials = [
        trial({LAYERS: 0, WIDTH: [3, 4]}, [1.2, 1.4], "running"),
        trial({LAYERS: 1, WIDTH: [3, 4]}, [1.5], "stopped"),
        trial({LAYERS: 2, WIDTH: [3, 4]}, [], "failed", "its process died"),
    ]
    write_trials(trials, half)
    found = overview(str(half))
    assert (found["complete"], found["winner"], found["wall_seconds"]) == (False, None, None)
    assert found["progress"]["ended"] == 1
    assert found["progress"]["planned"] == 9
    text = " ".join(printed(half, finished).split())
    assert (
        "half: not finished: 1 of 9 trials have ended (1 stopped), 1 interrupted, 1 failed; ahead on rung 2 of 3: "
        "target_layers 0, mask_width 3-4: speedup 0.933"
    ) in text
    assert "first [1]: 2.17" in text


def test_a_sweep_that_has_just_begun_and_one_without_end(tmp_path):
    write_run(tmp_path, {RATE: RANGE}, {"type": "random", "num_trials": 7})
    assert "0 of 7 trials have ended" in printed(tmp_path)
    assert overview(str(tmp_path))["worths"] == []


def marginals(search: SearchTrials, rung: int) -> dict[tuple[str, str], tuple[int, float | None, float | None]]:
    return {(one.key, one.value): (one.trials, one.mean, one.best) for one in worths(search, rung)}


def test_a_value_is_worth_what_its_trials_had_on_the_highest_rung_common_to_all():
    trials = [
        trial({LAYERS: 0, WIDTH: [1, 2]}, [1.5, 3.0, 9.0]), trial({LAYERS: 0, WIDTH: [3, 4]}, [1.5, 6.0], "stopped"),
        trial({LAYERS: 1, WIDTH: [1, 2]}, [1.5, 4.5], "stopped"),
        trial({LAYERS: 1, WIDTH: [3, 4]}, [1.5], "diverged"),
        trial({LAYERS: 0, WIDTH: [1, 2], "train.seed": 1}, [99.0]),
    ]  # fmt: skip
    for one in trials:
        one.choices["x.y"] = "only"
    search = searched(trials, read_space({LAYERS: [0, 1, 2], WIDTH: [[1, 2], [3, 4]], "x.y": ["only"]}), "speedup")
    assert common_rung(search) == 1
    assert marginals(search, 1) == {
        (LAYERS, "0"): (2, pytest.approx(3.0), pytest.approx(4.0)), (LAYERS, "1"): (1, 3.0, 3.0),
        (LAYERS, "2"): (0, None, None),
        (WIDTH, "1-2"): (2, pytest.approx(2.5), 3.0), (WIDTH, "3-4"): (1, 4.0, 4.0),
    }  # fmt: skip
    assert marginals(search, 0)[(LAYERS, "1")] == (2, 1.0, 1.0)


def test_a_range_is_looked_at_in_parts_on_its_own_scale():
    trials = [trial({RATE: value}, [tau]) for value, tau in ((1e-4, 1.5), (2e-4, 3.0), (0.02, 4.5), (1.0, 6.0))]
    found = marginals(searched(trials, read_space({RATE: RANGE}), "speedup"), 0)
    assert list(found) == [(RATE, f"{low} to {high}") for low, high in (
        ("0.0001", "0.001"), ("0.001", "0.01"), ("0.01", "0.1"), ("0.1", "1"),
    )]  # fmt: skip
    rate = Range.model_validate(RANGE)
    assert [height(rate, value) for value in (1e-4, 1e-2, 1.0)] == pytest.approx([0.0, 0.5, 1.0])
    assert height(Range(type="uniform", low=1.0, high=3.0), 1.5) == 0.25
    assert list(found.values()) == [(2, 1.5, 2.0), (0, None, None), (1, 3.0, 3.0), (1, 4.0, 4.0)]


@pytest.mark.parametrize("kind", ["absent", "empty", "file", "another run", "another sweep", "damaged"])
def test_a_folder_that_is_no_sweep_is_named(tmp_path, kind):
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("")
    elif kind != "absent":
        place.mkdir()
    if kind == "another run":
        (place / "run.yaml").write_text("config: {target: {model: x}}\n")
    if kind == "another sweep":
        text = "config: {drafters: [runs/a], space: {tree.type: [chain]}, objective: tau, ladder: {rungs: 3}}"
        (place / "run.yaml").write_text(text)
    if kind == "damaged":
        write_run(place, {LAYERS: 3})
    with pytest.raises(DataError, match=r"place.*(is no folder|holds no sweep|cannot be read)"):
        overview(str(place))


def test_what_was_found_is_written_where_it_was_asked_for(finished, tmp_path, capsys):
    main(COMMAND.load([str(finished), str(finished), "--json", str(tmp_path / "out.json")]))
    written = json.loads((tmp_path / "out.json").read_text())
    assert written == {"sweeps": [overview(str(finished))] * 2, "decoding": []}
    assert "first" in capsys.readouterr().out


def test_a_folder_that_is_no_sweep_is_one_line_and_an_exit_code(tmp_path):
    command = [sys.executable, "-m", "sweeps.summarize", str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr == (
        f"error: '{tmp_path}' holds no sweep: give the output of a `python -m sweeps.tune` or "
        "`python -m sweeps.tune_decoding`; a sweep over sparse targets has its report in its own folder\n"
    )
