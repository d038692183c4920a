"""Sweeps over decoding choices beside sweeps of trainings: winners, how sure, and how far those are that go on."""

import io
import json
from pathlib import Path

import pytest
import yaml
from decoding_trials import LEFT_OUT, TREES, config_of, shape, two_drafters, write_decoding_sweep
from rich.console import Console
from sweep_trials import GRID, a_grid, finalist, summary, write_trials

from moray.errors import DataError
from moray.provenance import read_json, write_json_atomically
from sweeps.decoding.combinations import Limits, Listing, listed
from sweeps.decoding.overview import decoding_overview, is_decoding, print_decoding_overviews
from sweeps.decoding.run import num_planned
from sweeps.reports.overview import overview
from sweeps.summarize import COMMAND, main
from sweeps.tuning.configs import OptunaSearch
from sweeps.tuning.resume import alone


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    write_decoding_sweep(tmp_path / "shapes", two_drafters())
    return tmp_path / "shapes"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    output = tmp_path / "trained"
    config = {
        "distill": ["a.yaml"], "space": GRID, "objective": "speedup", "search": {"type": "grid"},
        "ladder": {"rungs": 3, "reduction": 3, "stop": True},
    }  # fmt: skip
    output.mkdir()
    (output / "run.yaml").write_text(yaml.safe_dump({"config": config}, sort_keys=False))
    write_trials(a_grid(), output)
    write_json_atomically(output / "summary.json", summary(a_grid(), [finalist("alone", [2.0, 2.2])], GRID))
    return output


def printed(*folders: Path) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    print_decoding_overviews([decoding_overview(str(folder)) for folder in folders], console)
    return console.export_text()


def test_a_finished_sweep_names_each_drafter_s_winner_and_how_sure(finished):
    found = decoding_overview(str(finished))
    assert (found["complete"], found["num_trials"], found["wall_seconds"]) == (True, 7, 4000.0)
    assert found["left_out"] == LEFT_OUT
    assert found["between"]["best"] == "moa"
    moa, eagle = found["drafters"]["moa"], found["drafters"]["eagle"]
    assert moa["winner"]["name"] == "moa, dynamic-5x4-16"
    assert moa["winner"]["choices"] == {"tree": TREES[2], "draft_vocab_size": None}
    low, high = moa["winner"]["spread"]
    assert moa["winner"]["objective"] == pytest.approx(3.1 / 1.4)
    assert low < moa["winner"]["objective"] < high
    assert moa["runner_up"]["name"] == "moa, chain-5"
    assert moa["sure"]["stays_ahead"] == 1.0
    assert moa["sure"]["ahead_by"] == pytest.approx(3.1 / 1.4 - 2.4 / 1.5)
    assert (eagle["winner"]["name"], eagle["runner_up"]["name"]) == ("eagle, chain-3", "eagle, chain-5")
    assert eagle["evaluate"] == str(finished / "best-eagle.yaml")
    lines = printed(finished).splitlines()
    first = next(line for line in lines if "moa, dynamic-5x4-16" in line)
    for cell in ("moa, dynamic-5x4-16: 2.21 (2.11 to 2.31)", "speedup", "100 %", " 4 ", "1:06:40"):
        assert cell in first
    assert any("moa, chain-5: 1.60 (1.50 to 1.70)" in line for line in lines)
    assert "not finished" not in "".join(lines)


def test_an_unfinished_sweep_says_how_far_each_drafter_is(tmp_path):
    half = [one for one in two_drafters() if one.choices["drafter"] == "moa"][:2]
    write_decoding_sweep(tmp_path, [*half, shape("moa", TREES[2], [2.9], "running")], is_finished=False)
    found = decoding_overview(str(tmp_path))
    assert (found["complete"], found["between"], found["left_out"]) == (False, None, None)
    assert found["drafters"]["moa"]["winner"] is None
    assert found["drafters"]["moa"]["progress"] == {
        "planned": 6, "begun": 3, "ended": 2, "states": {"finished": 2, "running": 1}, "rungs": 3,
        "worked_on": False,
        "leader": {"name": "moa, chain-5", "rung": 2, "objective": pytest.approx(1.6)},
    }  # fmt: skip
    text = " ".join(printed(tmp_path).split())
    assert (
        f"{tmp_path}, moa: not finished: 2 of 6 trials have ended (2 finished), 1 interrupted; ahead on rung 3 of 3: "
        "moa, chain-5: speedup 1.60"
    ) in text
    assert f"{tmp_path}, eagle: not finished: 0 of 5 trials have ended" in text
    with alone(tmp_path):
        assert "have ended (2 finished), 1 running; ahead" in " ".join(printed(tmp_path).split())


def test_a_sweep_without_a_plan_knows_what_its_search_says(tmp_path):
    write_decoding_sweep(tmp_path, two_drafters(), is_finished=False, search={"type": "random", "num_trials": 9})
    (tmp_path / "plan.json").unlink()
    assert decoding_overview(str(tmp_path))["drafters"]["moa"]["progress"]["planned"] == 9
    write_decoding_sweep(tmp_path, two_drafters(), is_finished=False)
    (tmp_path / "plan.json").unlink()
    assert "4 of ? trials have ended" in printed(tmp_path)


def test_trials_of_a_space_that_was_left_are_planned_as_well(tmp_path):
    write_decoding_sweep(tmp_path, two_drafters(), is_finished=False)
    smaller = config_of(tmp_path, space={"tree": TREES[:2]})
    listings = {name: listed(smaller.space, Limits(name, None, 1024)) for name in ("moa", "eagle")}
    assert [num_planned(smaller, one, name) for name, one in listings.items()] == [2 + 2, 2 + 1]
    assert num_planned(config_of(tmp_path / "new"), listings["moa"], "moa") == 2
    for record in (tmp_path / "trials").glob("*/trial.json"):
        values = read_json(record)
        drawn = {key: value for key, value in values["choices"].items() if key in smaller.space}
        write_json_atomically(record, values | {"drawn": drawn})
    proposed = smaller.model_copy(update={"search": OptunaSearch(type="optuna", num_trials=5)})
    assert num_planned(proposed, Listing(), "moa") == 5 + 2


def test_a_drafter_of_which_nothing_came_to_an_end_has_no_winner(tmp_path):
    trials = [shape("moa", TREES[0], [1.0, 1.1, 1.2]), shape("eagle", TREES[0], [], "failed", "its process died")]
    write_decoding_sweep(tmp_path, trials)
    found = decoding_overview(str(tmp_path))["drafters"]
    assert (found["eagle"]["winner"], found["moa"]["runner_up"]) == (None, None)
    assert "eagle: no trial came to its end" in printed(tmp_path)


def test_names_are_no_markup(tmp_path):
    name = "[red]moa"
    write_decoding_sweep(tmp_path, [shape(name, TREES[0], [1.0, 1.1, 1.2])], drafters=[f"runs/{name}"])
    assert "[red]moa, chain-3: 0.800" in printed(tmp_path)


def test_both_kinds_are_summarised_in_one_call(finished, trained, tmp_path, capsys):
    assert (is_decoding(str(finished)), is_decoding(str(trained)), is_decoding(str(tmp_path))) == (True, False, False)
    main(COMMAND.load([str(finished), str(trained), "--json", str(tmp_path / "out.json")]))
    written = json.loads((tmp_path / "out.json").read_text())
    assert written == {"sweeps": [overview(str(trained))], "decoding": [decoding_overview(str(finished))]}
    shown = capsys.readouterr().out
    assert "alone" in shown
    assert "dynamic-5x4-16" in shown
    main(COMMAND.load([str(finished)]))
    alone = capsys.readouterr().out
    assert "winner, runner-up" in alone
    assert "Sweeps" not in [line.strip() for line in alone.splitlines()], "no table without a line"


def test_a_damaged_sweep_is_named(finished):
    record = next((finished / "trials").glob("*/trial.json"))
    record.write_text(json.dumps({"choices": {"x": 1}, "begun": 1, "state": "finished", "message": None}))
    with pytest.raises(DataError, match=r"shapes' holds a trial that no sweep over decoding choices"):
        decoding_overview(str(finished))
