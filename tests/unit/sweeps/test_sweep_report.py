"""The page of a sweep is whole, self-contained and safe for any number of trials, and says how sure the winner is."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_page import HOSTILE, Page
from sweep_trials import GRID, LAYERS, RATE, RUNGS, WIDTH, a_grid, finalist, summary, trial

from moray.provenance import read_json
from sweeps.reports.report import how_sure_in_words, render_html, write_sweep
from sweeps.reports.results import Trial

PLOTS = ("map-tau", "map-speedup", "curves", "pareto", "parallel", "ranks")
RANGED = {LAYERS: [0, 1], "drafter.kind": ["a", "b"], WIDTH: [[1, 2], [3, 4]], RATE: {
    "type": "loguniform", "low": 1e-3, "high": 1e-1,
}}  # fmt: skip


def page_of(trials: list[Trial], space: dict[str, Any], objective: str = "speedup", **changes: Any) -> Page:
    finalists = [finalist("first", [2.0, 2.2], [2.1, 2.4]), finalist("second", [1.0, 1.2], [1.1, 1.4])]
    return Page(render_html(summary(trials, finalists, space, objective) | changes, trials))


def one_trial() -> tuple[list[Trial], dict[str, Any]]:
    return [trial({LAYERS: 0, WIDTH: [3, 4]}, [1.5, 1.7, 1.9])], {LAYERS: [0], WIDTH: [[3, 4]]}


def all_keys() -> tuple[list[Trial], dict[str, Any]]:
    lists = {key: values for key, values in RANGED.items() if isinstance(values, list)}
    trials = a_grid(lists)
    return [
        Trial(one.name, {**one.choices, RATE: 10 ** -(1 + i / 4)}, one.state, one.message, one.rows, one.folder)
        for i, one in enumerate(trials)
    ], RANGED


def a_hundred() -> tuple[list[Trial], dict[str, Any]]:
    space = {LAYERS: list(range(10)), WIDTH: [[i, i + 1] for i in range(10)]}
    return a_grid(space), space


def without_figures() -> tuple[list[Trial], dict[str, Any]]:
    trials, space = a_grid(), GRID
    for one in trials:
        for of_rung in one.rows:
            of_rung.update(speedup=None, draft_cost=None, loss=None)
    del trials[0].rows[0]["tau_spread"]
    return trials, space


@pytest.mark.parametrize(
    ("shape", "missing"),
    [
        (lambda: (a_grid(), GRID), set()),
        (one_trial, {"map-tau", "map-speedup", "parallel", "ranks"}),
        (all_keys, set()),
        (a_hundred, set()),
        (without_figures, {"map-speedup", "pareto", "parallel"}),
    ],
)
def test_the_page_is_whole_and_fetches_nothing(shape, missing):
    trials, space = shape()
    page = page_of(trials, space)
    assert {name for name in PLOTS if not page.has(name)} == missing
    assert tuple(page.figures) == PLOTS
    assert max(page.ids.values()) == 1
    for name in ("finalists", "trials", "machine", "versions", "config"):
        assert page.ids[f"table-{name}"] == 1
    assert "http" not in page.source
    assert not {name for name, _ in page.attributes} & {"src", "onclick", "onload", "srcset", "action"}
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", page.source))
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["image"] == 0
    described = {value for name, value in page.attributes if name in ("aria-describedby", "aria-labelledby")}
    assert described <= set(page.ids)
    assert len(page.source) < 700_000


def test_the_same_sweep_gives_the_same_page():
    assert page_of(a_grid(), GRID).source == page_of(a_grid(), GRID).source


def test_what_comes_from_outside_is_text():
    space = {LAYERS: [HOSTILE, "b"], f"x.{HOSTILE}": ["c", "d"]}
    trials = a_grid(space)
    trials.append(trial({LAYERS: HOSTILE, f"x.{HOSTILE}": "d"}, [], "failed", HOSTILE))
    page = page_of(trials, space, versions={HOSTILE: HOSTILE}, machine={"cpu": HOSTILE})
    assert page.tags["script"] == 0
    assert "<script" not in page.source
    assert page.text.count(HOSTILE) > 5


def test_a_trial_that_was_stopped_shows_at_which_share_of_training():
    trials = [
        trial({LAYERS: 0, WIDTH: [3, 4]}, [1.13, 1.22, 1.33]), trial({LAYERS: 0, WIDTH: [5, 15]}, [1.44], "stopped"),
        trial({LAYERS: 1, WIDTH: [3, 4]}, [1.57, 1.66], "stopped"),
        trial({LAYERS: 1, WIDTH: [5, 15]}, [], "failed", "its process died"),
    ]  # fmt: skip
    page = page_of(trials, {LAYERS: [0, 1, 2], WIDTH: [[3, 4], [5, 15]]})
    cells = page.figures["map-tau"]
    for shown in ("1.33", "1.44", "11 %", "1.66", "33 %", "failed", "Pale and hatched"):
        assert shown in cells
    for hidden in ("1.13", "1.22", "1.57", "100 %"):
        assert hidden not in cells
    assert page.tags["pattern"] >= 1, "hatches"
    finished = page_of(trials[:1], {LAYERS: [0, 1], WIDTH: [[3, 4], [5, 15]]})
    assert finished.tags["pattern"] == 0
    assert "Pale and hatched" not in finished.text


def test_a_cell_holds_the_best_of_those_trained_longest_and_says_so():
    trials = [
        trial({LAYERS: 0, WIDTH: [1, 2], "x.y": kind}, taus, state)
        for kind, taus, state in (
            ("a", [1.1, 1.2, 1.31], "finished"), ("b", [1.1, 1.2, 1.42], "finished"), ("c", [9.9, 9.8], "stopped"),
        )
    ]  # fmt: skip
    page = page_of(trials, {LAYERS: [0, 1], WIDTH: [[1, 2], [3, 4]], "x.y": ["a", "b", "c"]})
    cells = page.figures["map-tau"].partition("Each cell")
    assert "1.42" in cells[0]
    assert not [value for value in ("1.31", "9.8", "9.9") if value in cells[0]]
    assert "best of its trials over y" in cells[2]


def test_one_key_is_a_map_of_one_column_and_a_range_alone_has_none():
    trials = [trial({LAYERS: value, RATE: 0.01}, [1.0, 1.1, 1.2 + value]) for value in (0, 1)]
    rate = RANGED[RATE]
    assert "2.20" in page_of(trials, {LAYERS: [0, 1], RATE: rate}).figures["map-tau"]
    page = page_of([trial({RATE: 0.01}, [1.0, 1.1])], {RATE: rate})
    assert not page.has("map-tau")
    assert page.has("parallel")


def test_trainings_from_other_seeds_are_in_the_table_alone():
    extra = trial({**a_grid()[0].choices, "train.seed": 1}, [8.5])
    plain, more = page_of(a_grid(), GRID), page_of([*a_grid(), extra], GRID)
    assert "8.50" in more.text
    assert more.figures == plain.figures
    assert more.text.count("seed 1") == 1


def test_trials_of_a_space_that_was_left_are_in_the_table_alone():
    """A sweep may go on with another space; what it had stays in its folder."""
    left = [
        trial({LAYERS: 7, WIDTH: [3, 4]}, [8.5]), trial({LAYERS: 1}, [8.5]),
        trial({LAYERS: 0, WIDTH: [3, 4], RATE: 0.1}, [8.5]),
    ]  # fmt: skip
    plain, more = page_of(a_grid(), GRID), page_of([*a_grid(), *left], GRID)
    assert more.text.count("8.50") == 3
    assert more.figures == plain.figures
    ranged = [trial({RATE: rate}, [tau]) for rate, tau in ((0.01, 1.5), (0.5, 8.5))]
    page = page_of(ranged, {RATE: RANGED[RATE]})
    assert "8.50" in page.text
    assert "8.50" not in page.figures["parallel"]


@pytest.mark.parametrize("objective", ["speedup", "tau", "tokens_per_second"])
def test_every_objective_has_its_curves(objective):
    trials = a_grid()
    for one in trials:
        for of_rung in one.rows:
            of_rung["objective"] = of_rung[objective]
    page = page_of(trials, GRID, objective)
    word = {"speedup": "speed-up", "tokens_per_second": "tokens per second"}.get(objective, objective)
    assert page.figures["curves"].strip().startswith(f"Learning: {word} and ")
    assert f"mean {word}" in page.text


def test_survivors_are_named_where_trials_were_stopped():
    whole = [trial({LAYERS: i}, [1 + i / 9, 1.5 + i / 9, 2 + i / 9]) for i in range(4)]
    space = {LAYERS: [0, 1, 2, 3, 4]}
    assert "says nothing" not in page_of(whole, space).text
    page = page_of([*whole, trial({LAYERS: 4}, [1.0], "stopped")], space)
    assert "says nothing of the trials that were stopped" in page.text
    assert "did not come to the last rung (1)" in page.text
    assert page.ids["table-ranks"] == 1
    assert page_of([trial({LAYERS: 0}, [1.5])], space).ids["table-ranks"] == 0


def test_an_output_that_was_not_the_target_s_is_a_defect_and_not_on_the_front():
    trials = [trial({LAYERS: 0}, [1, 2.0, 3.0]), trial({LAYERS: 1}, [1, 2.0, 9.0], cost=0.2, lossless=False)]
    page = page_of(trials, {LAYERS: [0, 1]})
    assert "NO" in page.text
    assert "2  target_layers 1" not in page.figures["pareto"]
    trials[1].rows[-1]["lossless"] = True
    assert "2  target_layers 1" in page_of(trials, {LAYERS: [0, 1]}).figures["pareto"]


def sentences(*finalists: Any) -> str:
    return " ".join(how_sure_in_words(summary(a_grid(), finalists, GRID)))


def test_the_page_says_when_it_is_not_sure():
    close = finalist("one", [1.0, 1.6], [1.3, 1.1]), finalist("other", [1.3, 1.1], [1.0, 1.59])
    assert sentences(*close).startswith(
        "The two best cannot be told apart by these measurements. one is ahead of other"
    )
    clear = finalist("fast", [2.0, 2.2], [2.1, 2.4]), finalist("slow", [1.0, 1.2], [1.1, 1.4])
    assert "cannot be told apart" not in sentences(*clear)
    assert "stays ahead in 100 % of resamples" in sentences(*clear)
    assert "With 2 trainings of each, the interval is rather too narrow" in sentences(*clear)
    assert "With one training of each" in sentences(finalist("a", [2.0]), finalist("b", [1.0]))
    many = [finalist(name, *([speed, speed + 0.1] for _ in range(5))) for name, speed in (("a", 2.0), ("b", 1.0))]
    assert "trainings" not in sentences(*many)
    assert "none to compare it with" in sentences(finalist("only", [1.0]))


def test_rounds_of_a_batch_are_called_so():
    trials, config = a_grid(), {"space": GRID, "decoding": {"batch_size": 4}}
    page, single = page_of(trials, GRID, config=config), page_of(trials, GRID)
    assert "resamples of rounds and seeds" in page.text
    assert "middle half of rounds" in page.text
    assert "resamples of prompts and seeds" in single.text
    assert "rounds" not in single.text


def test_all_is_written_and_the_summary_last(tmp_path: Path, monkeypatch):
    trials = a_grid()
    given = summary(trials, [finalist("only", [1.0])], GRID)
    write_sweep(given, trials, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "summary.json", "sweep.parquet"]
    assert read_json(tmp_path / "summary.json") == given
    table = pd.read_parquet(tmp_path / "sweep.parquet")
    assert len(table) == sum(len(one.rows) for one in trials)
    assert set(table["rung_tokens"]) == set(RUNGS)
    assert "answers" not in table
    assert table[LAYERS].max() == 2
    (tmp_path / "summary.json").unlink()

    def fail(*_: Any) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr("sweeps.reports.report.render_html", fail)
    with pytest.raises(RuntimeError, match="no page"):
        write_sweep(given, trials, tmp_path)
    assert not (tmp_path / "summary.json").exists(), "it says that the sweep is complete"


def test_rows_read_back_from_json_make_the_same_page(tmp_path: Path):
    trials = a_grid()
    given = summary(trials, [finalist("only", [1.0])], GRID)
    write_sweep(given, trials, tmp_path)
    assert render_html(read_json(tmp_path / "summary.json"), trials) == (tmp_path / "report.html").read_text()
