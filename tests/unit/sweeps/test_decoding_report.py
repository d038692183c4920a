"""The page of a sweep over decoding choices: winners with their commands, all trials, and what was left out."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from decoding_trials import TREES, config_of, decoding_summary, shape, two_drafters, write_decoding_sweep
from report_page import HOSTILE, Page

from moray.bench.configs import EvaluateConfig
from moray.config import load_config
from moray.provenance import read_json
from sweeps.decoding.report import evaluate_command, render_html, sure_in_words, write_decoding
from sweeps.reports.results import Trial

PLOTS = ("objective-0", "pareto-0", "objective-1", "pareto-1")


def page_of(trials: list[Trial], changes: dict[str, Any] | None = None, **sweep: Any) -> Page:
    return Page(render_html(decoding_summary(trials, config_of(**sweep)) | (changes or {}), trials))


def many() -> list[Trial]:
    taus = [1.2 + (7 * i % 60) / 30 for i in range(60)]
    return [shape("moa", {"type": "chain", "depth": i + 1}, [tau] * 3) for i, tau in enumerate(taus)]


def without_figures() -> list[Trial]:
    trials = two_drafters()
    for one in trials[4:]:
        for of_rung in one.rows:
            of_rung.update(draft_cost=None, efficiency=None, speedup_spread=None, objective=None)
    return trials


@pytest.mark.parametrize(
    ("trials", "plots"), [(two_drafters(), PLOTS), ([shape("moa", TREES[0], [1.5])], PLOTS[:2]), (many(), PLOTS[:2])]
)
def test_the_page_is_whole_and_fetches_nothing(trials, plots):
    page = page_of(trials)
    assert tuple(page.figures) == plots
    assert all(page.has(name) for name in plots)
    assert max(page.ids.values()) == 1
    for name in ("finalists", "trials", "left-out", "machine", "versions", "config"):
        assert page.ids[f"table-{name}"] == 1
    assert "http" not in page.source
    assert not {name for name, _ in page.attributes} & {"src", "onclick", "onload", "srcset", "action"}
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", page.source))
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == page.tags["image"] == 0
    described = {value for name, value in page.attributes if name in ("aria-describedby", "aria-labelledby")}
    assert described <= set(page.ids)
    assert page.source == page_of(trials).source, "the same sweep gives the same page"
    assert len(page.source) < 400_000


def test_what_comes_from_outside_is_text():
    drafter = HOSTILE.replace("/", "")  # a folder's name has no slash
    trials = [
        shape(drafter, TREES[0], [1.5, 1.6, 1.7]), shape(drafter, TREES[1], [1.5, 1.6, 1.8]),
        shape(drafter, TREES[2], [], "failed", HOSTILE),
    ]  # fmt: skip
    outside = {"versions": {HOSTILE: HOSTILE}, "machine": {"cpu": HOSTILE}, "left_out": {drafter: {HOSTILE: 2}}}
    page = page_of(trials, outside, drafters=[f"runs/{drafter}"], target={"model": HOSTILE}, output=HOSTILE)
    assert page.tags["script"] == 0
    assert "<script" not in page.source
    assert page.text.count(HOSTILE) > 5
    assert page.figures["objective-0"].count(drafter) >= 2
    assert drafter in page.figures["pareto-0"]


def test_every_drafter_has_a_winner_and_the_command_that_evaluates_it():
    page = page_of(two_drafters())
    assert "Winner: moa, dynamic-5x4-16" in page.text
    assert "Winner: eagle, chain-3" in page.text
    assert "Speed-up 2.21 (95 % interval 2.11 to 2.31), measured again after the search." in page.text
    assert "moa, dynamic-5x4-16 is ahead of moa, chain-5 by 0.614 in speed-up" in page.text
    assert "moa is ahead of eagle, each at its best, by 1.53 in speed-up" in page.text
    for name in ("moa", "eagle"):
        assert f"python -m pipelines.evaluate runs/s/best-{name}.yaml target.model=runs/demo/target" in page.text
    alone = page_of([one for one in two_drafters() if one.choices["drafter"] == "moa"])
    assert "each at its best" not in alone.text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpus": 1.0, "threads": None, "num_questions": None, "max_model_len": 512, "max_new_tokens": 128},
        {"target": {"model": "it's 12", "dtype": "bfloat16", "template": "null"}, "questions": "7"},
        {"sampling": {"temperature": 0.7, "seed": 3}, "confirm": {"num_questions": 5}},
    ],
)
def test_the_command_asks_what_the_sweep_asked(tmp_path, changes):
    write_decoding_sweep(tmp_path, two_drafters(), **changes)
    sweep = config_of(tmp_path, **changes)
    answer = read_json(tmp_path / "summary.json")["drafters"]["moa"]
    config, path = sweep.model_dump(mode="json"), str(tmp_path / "best-moa.yaml")
    of_earlier_version = {"max_context" if key == "max_model_len" else key: value for key, value in config.items()}
    assert evaluate_command(of_earlier_version, path) == evaluate_command(config, path)
    program, *words = shlex.split(evaluate_command(config, path))
    assert (program, words[:2]) == ("python", ["-m", "pipelines.evaluate"])
    found = load_config(EvaluateConfig, words[2:])
    count = sweep.confirm.num_questions or sweep.num_questions
    asked = sweep.evaluation(("runs/demo/moa",), found.trees, found.output, count or 1)
    own = {"compare_generate": True, "exact_phases": False, "num_questions": count}
    assert found == asked.model_copy(update=own)
    assert json.loads(found.trees[0].model_dump_json()) == answer["winner"]["tree"]
    assert len([word for word in words if "=" in word]) < 10, "defaults need no words"


def test_all_trials_are_in_the_table_and_finalists_are_marked():
    page = page_of(two_drafters())
    table = page.source.partition('id="table-trials"')[2].partition("</table>")[0]
    rows = [re.sub(r"<[^>]+>", "|", line) for line in table.splitlines() if 'scope="row"' in line]
    names = [row.strip("|").partition("|")[0] for row in rows]
    assert names == [
        "moa, dynamic-5x4-16 *", "moa, chain-5 *", "moa, chain-3", "moa, dynamic-5x4-16, 512 tokens",
        "eagle, chain-3 *", "eagle, chain-5 *", "eagle, dynamic-5x4-16",
    ]  # fmt: skip
    shown = [re.sub(r"\|+", " ", row).split() for row in rows]
    assert shown[0][3:] == [
        "finished", "3", "16", "3.10", "2.21x", "221", "5.00", "0.0800", "1.20", "90", "%", "yes",
    ]  # fmt: skip
    assert shown[3][4:7] == ["stopped", "1", "4"]
    assert shown[6][2:5] == ["failed", "-", "-"]
    assert "its process died" in page.text


def test_efficiency_has_a_column_only_if_it_is_known():
    trials = two_drafters()
    assert "efficiency" in page_of(trials).text
    for one in trials:
        for of_rung in one.rows:
            of_rung["efficiency"] = None
    assert "efficiency" not in page_of(trials).text


def test_what_was_left_out_is_listed_with_its_reasons():
    page = page_of(two_drafters())
    table = page.source.partition('id="table-left-out"')[2].partition("</table>")[0]
    rows = [re.sub(r"(<[^>]+>)+", "|", line) for line in table.splitlines() if 'scope="row"' in line]
    assert rows == ["|moa|3|the same as another one|", "|moa|2|breadth 4 is more than 2 nodes|"]
    assert "Combinations of the space" in page.text
    proposed = page_of(two_drafters(), search={"type": "optuna", "num_trials": 4})
    assert "Proposals of the space" in proposed.text
    assert "every combination that was chosen was tried" in page_of(two_drafters(), {"left_out": {"moa": {}}}).text


def test_bars_stand_in_the_order_of_the_table_with_what_finalists_came_to():
    shown = page_of(two_drafters()).figures["objective-0"]
    places = [
        shown.index(f" {name}") for name in ("dynamic-5x4-16", "chain-5", "chain-3", "dynamic-5x4-16, 512 tokens")
    ]
    assert places == sorted(places)
    for text in ("2.21, then 2.21", "1.60, then 1.60", "1.33", "1.67"):
        assert text in shown
    assert "1.33, then" not in shown, "no finalist"
    for text in ("finalist, in the search", "finalist, side by side", "asked fewer questions", "Pale: stopped early"):
        assert text in shown
    assert "Pale: stopped early" in page_of(two_drafters()).figures["objective-1"], "a finalist, too, may be stopped"
    whole = page_of([one for one in two_drafters() if one.state == "finished"]).figures["objective-0"]
    assert "Pale" not in whole
    assert "asked fewer questions" not in whole


def test_of_many_bars_the_first_are_drawn_and_all_are_in_the_table():
    page = page_of(many())
    assert "The last 36 are left out here; the table has them." in page.figures["objective-0"]
    assert page.source.count('<tr><th scope="row">moa, chain-') == 60 + 2, "trials and finalists"


def test_a_plot_without_figures_says_so():
    page = page_of(two_drafters())
    trials = without_figures()
    bare = Page(render_html(decoding_summary(two_drafters()), trials))
    assert {name for name in PLOTS if page.has(name) and not bare.has(name)} == {"objective-1", "pareto-1"}
    assert "no trial has a speed-up" in bare.figures["objective-1"]


def test_trials_that_were_stopped_or_not_lossless_are_not_on_the_front():
    trials = [*two_drafters()[:3], shape("moa", TREES[2], [9.0, 9.1, 9.2], size=64, lossless=False)]
    front = page_of(trials).figures["pareto-0"]
    assert "1  dynamic-5x4-16" in front
    assert "64 tokens" not in front
    assert "Hollow" in front
    trials[-1].rows[-1]["lossless"] = True
    assert "dynamic-5x4-16, 64 tokens" in page_of(trials).figures["pareto-0"]


@pytest.mark.parametrize("objective", ["speedup", "tau", "tokens_per_second"])
def test_every_objective_has_its_word(objective):
    trials = two_drafters()
    for one in trials:
        for of_rung in one.rows:
            of_rung["objective"] = of_rung[objective]
    page = page_of(trials, objective=objective)
    word = {"speedup": "speed-up", "tokens_per_second": "tokens per second"}.get(objective, objective)
    assert page.figures["objective-0"].strip().startswith(f"moa: {word} by way to decode")
    assert f"in {word} (95 % interval" in page.text
    assert ("no gain" in page.text) == (objective == "speedup")
    finalists = page.source.partition('id="table-finalists"')[2].partition("</table>")[0]
    assert finalists.count('<th scope="col">95 %') == (3 if objective == "tokens_per_second" else 2)
    assert len({line.count("<t") for line in finalists.splitlines() if 'scope="row"' in line}) == 1


def test_the_page_says_when_it_is_not_sure():
    close = [shape("moa", TREES[0], [1.5, 1.6, 1.8]), shape("moa", TREES[1], [1.5, 1.6, 1.8])]
    answer = decoding_summary(close)["drafters"]["moa"]
    assert "The two best cannot be told apart by these measurements." in sure_in_words(answer, "tau")
    only = decoding_summary(close[:1])["drafters"]["moa"]
    assert "none to compare it with" in sure_in_words(only, "tau")[-1]
    clear = decoding_summary(two_drafters())["drafters"]["moa"]
    assert "cannot be told apart" not in " ".join(sure_in_words(clear, "tau"))


def test_all_is_written_and_the_summary_last(tmp_path: Path, monkeypatch):
    trials = two_drafters()
    given = decoding_summary(trials)
    write_decoding(given, trials, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "summary.json", "sweep.parquet"]
    assert render_html(read_json(tmp_path / "summary.json"), trials) == (tmp_path / "report.html").read_text()
    (tmp_path / "summary.json").unlink()

    def fail(*_: Any) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr("sweeps.decoding.report.render_html", fail)
    with pytest.raises(RuntimeError, match="no page"):
        write_decoding(given, trials, tmp_path)
    assert not (tmp_path / "summary.json").exists(), "it says that the sweep is complete"
