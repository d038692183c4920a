"""The report: what is written is what was measured, and the page is whole, self-contained and safe."""

import io
import json
import math
import re
import stat
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moray.bench.reports.console import print_report
from moray.bench.reports.report import write_report
from moray.bench.reports.schema import Report, read_report
from moray.errors import DataError

HOSTILE = '<script>alert("x")</script> & [red]$\\frac$ ]]> -->'
VOID = {"meta", "br", "hr", "img", "link", "input"}


def row(**changes: Any) -> dict[str, Any]:
    return {
        "drafter": "moa", "tree": "chain(4)", "temperature": 0.0, "tau": 3.5, "tokens_per_second": 812.4,
        "speedup_vs_plain": 1.75, "speedup_vs_generate": 2.6, "efficiency": 0.9, "lossless": True,
        "num_prompts": 20, "num_tokens": 1280, "speedup_in_cycles": 1.9,
        "draft_steps": 4.0, "draft_cost": 0.2, "verify_cost": 1.2,
        "acceptance_by_position": [0.9, 0.8, 0.75, 0.7],
        "depth_shares": [0.5, 0.25, 0.0, 0.25], "layer_count_shares": {"0": 0.25, "2": 0.75},
        "phases_ms": {"propose": 1.0, "verify": 2.0, "accept": 0.1, "commit": 0.1, "observe": 0.2, "other": 0.1},
        "tau_spread": [3.25, 3.75], "speedup_spread": [1.5, 1.9], "speedup_median": 1.7,
        "speedup_quartiles": [1.62, 1.78], "trainable_parameters": 235_000, "training_tokens": 1_234_567,
        "training_seconds": 3725.0,
    } | changes  # fmt: skip


def category(name: str, speedup: float, tau: float, **changes: Any) -> dict[str, Any]:
    return {
        "category": name, "drafter": "moa", "tree": "chain(4)", "temperature": 0.0, "tau": tau,
        "speedup_vs_plain": speedup, "speedup_vs_generate": None, "num_prompts": 10, "num_tokens": 640,
    } | changes  # fmt: skip


def full_report() -> dict[str, Any]:
    return {
        "rows": [row(), row(tree="dynamic(6, 8, 30)", tau=4.5, lossless=False), row(drafter="eagle", lossless=None)],
        "baselines": [
            {"name": name, "temperature": 0.0, "tokens_per_second": speed}
            for name, speed in (("plain", 464.2), ("generate", 312.0))
        ],
        "categories": [category("qa", 1.6, 3.2), category("rag", 2.0, 4.0)],
        "training": {"moa": {"step": [1, 2, 3], "loss": [9.0, 2.0, 0.1], "simulated_tau": [None, 2.5, None]}},
        "validation": {
            "moa": {"step": [2, 3], "tokens": [2e6, 3e6], "seconds": [600.0, 900.0], "real_tau": [1.5, 1.75]}
        },
        "machine": {"cpu": "two cores", "memory": {"gib": 8}},
        "settings": {"seed": 0},
        "notes": ["batch 1"],
    }


class Page(HTMLParser):
    """Checks the nesting of elements while it reads, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids.update(value or "" for name, value in attrs if name == "id")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(values: dict[str, Any], folder: Path) -> Page:
    return Page(write_report(values, folder)[1].read_text(encoding="utf-8"))


def console_text(values: dict[str, Any], width: int = 120, **options: Any) -> str:
    buffer = io.StringIO()
    print_report(values, Console(file=buffer, width=width, **options))
    return buffer.getvalue()


def test_json_holds_what_was_given(tmp_path: Path) -> None:
    json_path, html_path = write_report(full_report(), tmp_path / "new" / "folder")
    assert (json_path.name, html_path.name) == ("report.json", "report.html")
    read_back = json.loads(json_path.read_text(encoding="utf-8"))
    given = full_report()
    assert {key: read_back[key] for key in given} == given
    write_report(read_back, tmp_path / "again")
    assert (tmp_path / "again" / "report.json").read_bytes() == json_path.read_bytes()
    assert (tmp_path / "again" / "report.html").read_bytes() == html_path.read_bytes()


def test_files_are_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_report(full_report(), tmp_path)
    write_report(full_report() | {"notes": ["second"]}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["notes"] == ["second"]
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_page_is_well_formed_and_holds_every_table_and_plot(tmp_path: Path) -> None:
    page = page_of(full_report(), tmp_path)
    for name in ("results", "costs", "phases", "categories", "acceptance", "training", "machine", "settings"):
        assert page.ids[f"table-{name}"] == 1
    for name in ("speedup", "acceptance", "phases", "categories", "learning", "training-0"):
        assert page.ids[f"plot-{name}"] == 1
    assert page.tags["svg"] == 6
    assert max(page.ids.values()) == 1
    assert "1.75x" in page.text
    assert "NO" in page.text
    assert "not checked" in page.text
    assert "memory.gib" in page.text
    assert "moa: tau 1.75 after 3,000,000 tokens" in page.text
    assert "3.25 to 3.75" in page.text
    assert "1.62 to 1.78" in page.text


def test_page_says_once_per_drafter_what_its_training_took(tmp_path: Path) -> None:
    text = page_of(full_report(), tmp_path).text
    assert text.count("235,000") == 2, "one line each for two drafters, however many rows they have"
    assert text.count("1,234,567") == text.count("1:02:05") == 2
    unknown = row(trainable_parameters=None, training_tokens=None, training_seconds=None)
    assert page_of({"rows": [unknown]}, tmp_path).ids["table-training"] == 0


def test_the_file_holds_the_means_over_categories(tmp_path: Path) -> None:
    path, _ = write_report(full_report(), tmp_path)
    written = json.loads(path.read_text())
    assert written["category_means"] == [
        {
            "drafter": "moa", "tree": "chain(4)", "temperature": 0.0, "tau": pytest.approx(3.6),
            "speedup_vs_plain": pytest.approx(1.8), "num_categories": 2,
        }
    ]  # fmt: skip
    assert read_report(written).category_means == read_report(full_report()).category_means


def two_temperatures() -> dict[str, Any]:
    rows = [
        row(),
        row(tree="dynamic", speedup_vs_plain=2.5),
        row(temperature=1.0),
        row(tree="dynamic", temperature=1.0),
    ]
    rows[3]["speedup_vs_plain"] = 0.5
    categories = [
        category(name, row["speedup_vs_plain"], tau, tree=row["tree"], temperature=row["temperature"])
        for row in rows
        for name, tau in (("qa", 3.0), ("rag", 5.0))
    ]
    baselines = [{"name": "plain", "temperature": float(T), "tokens_per_second": 400.0 + T} for T in (0, 1)]
    return full_report() | {"rows": rows, "categories": categories, "baselines": baselines}


def test_console_keeps_temperatures_apart() -> None:
    text = console_text(two_temperatures())
    assert "plain: 401 tokens/s without a drafter at T 1" in text
    cold, warm = text.split("by category at T 0")[1].split("by category at T 1")
    assert category_table("by category" + cold)[0][1] == "moa, dynamic", "the fastest tree at this temperature"
    assert category_table("by category" + warm)[0][1] == "moa, chain(4)"
    assert category_table("by category" + cold)[-1] == ["mean", "2.50 / 4.00", "20"]


def test_page_keeps_temperatures_apart(tmp_path: Path) -> None:
    page = page_of(two_temperatures(), tmp_path)
    text = " ".join(page.text.split())
    assert "plain at T 0 400 tokens/s; plain at T 1 401 tokens/s." in text
    for name in ("chain(4) · T 0", "chain(4) · T 1", "dynamic · T 0", "dynamic · T 1"):
        assert page.text.count(f"moa · {name}") >= 3, "bars of speed-up and phases, marks of categories"
    table = re.search(r'<table id="table-categories">.*?</table>', (tmp_path / "report.html").read_text(), re.DOTALL)
    assert table
    lines = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in table[0].split("<tr>")[1:]]
    assert lines[0] == ["drafter, tree", "T", "qa", "rag", "mean"]
    assert [line[1] for line in lines[1:]] == ["0", "0", "1", "1"]
    assert lines[4][2:] == ["0.500 / 3.00", "0.500 / 5.00", "0.500 / 4.00"]


def test_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = write_report(full_report(), tmp_path)[1].read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<img|<iframe", text)
    page = Page(text)
    referred = [value for name, value in page.attributes if name.endswith("href")]
    referred += ["#" + target for _, value in page.attributes for target in re.findall(r"url\(#(.*?)\)", value)]
    assert referred
    assert all(value.startswith("#") and page.ids[value[1:]] == 1 for value in referred)


def test_every_plot_has_a_title_and_a_description(tmp_path: Path) -> None:
    page = page_of(full_report(), tmp_path)
    labels = [value for name, value in page.attributes if name in ("aria-labelledby", "aria-describedby")]
    assert len(labels) >= 10
    assert all(page.ids[label] == 1 for label in labels)


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    hostile = full_report()
    hostile["rows"] = [row(drafter=HOSTILE, tree=HOSTILE), row(drafter="_hidden", tree="a\x00\nb" * 60)]
    hostile["categories"] = [category(HOSTILE, 1.0, 2.0, drafter=HOSTILE, tree="小")]
    hostile["training"] = {HOSTILE: {"step": [1], HOSTILE: [1.0]}, "_": {"step": [1], "_loss": [2.0], "kl": [1.0]}}
    hostile |= {
        "notes": [HOSTILE],
        "machine": {HOSTILE: HOSTILE},
        "baselines": [{"name": HOSTILE, "tokens_per_second": 1}],
    }
    page = page_of(hostile, tmp_path)
    assert page.tags["script"] == 0
    assert HOSTILE in page.text
    assert "<script>" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "[red]" in console_text(hostile)


def test_missing_series_are_explained(tmp_path: Path) -> None:
    bare = {key: value for key, value in row().items() if key not in ("acceptance_by_position", "phases_ms")}
    bare |= {"draft_cost": None, "speedup_spread": None}
    page = page_of({"rows": [bare], "training": {"moa": {"step": [1, 2], "loss": [None, math.nan]}}}, tmp_path)
    assert page.tags["svg"] == 1
    assert re.findall(r"Left out: (.*)\.", page.text) == [
        "no row has its acceptance by position",
        "no row has the times of its phases",
        "the questions had no categories, or none was measured",
        "its training log holds no figure",
    ]
    assert page.ids["table-phases"] == page.ids["table-categories"] == page.ids["table-acceptance"] == 0


def test_what_adaptive_drafts_chose_is_shown(tmp_path: Path) -> None:
    rows = [row(tree="adaptive-3"), row(), row(drafter="eagle", tree="adaptive-1", depth_shares=[0.9, 0.1])]
    page = page_of({"rows": rows}, tmp_path)
    assert page.ids["table-depths"] == 1
    table = page.text[page.text.index("What adaptive drafts chose") :]
    assert re.search(r"none\s*1\s*2\s*3\s*moa\s*adaptive-3\s*0\s*50 %\s*25 %\s*0 %\s*25 %\s*eagle", table), table[:400]
    assert page_of({"rows": [row()]}, tmp_path).ids["table-depths"] == 0, "nothing was chosen"


def test_a_report_without_rows(tmp_path: Path) -> None:
    page = page_of({"rows": []}, tmp_path)
    assert page.tags["svg"] == 0
    assert page.text.count("Left out:") == 5
    assert "no drafter was measured" in console_text({"rows": []})


def test_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    odd = row(
        tau=math.nan, speedup_vs_generate=math.inf, tokens_per_second=np.float32(2.5), num_tokens=np.int64(7),
        lossless=np.bool_(True), acceptance_by_position=np.array([0.5, math.nan]), speedup_spread=(math.nan, 2.0),
        phases_ms={"propose": math.nan, "verify": 1.0},
    )  # fmt: skip
    json_path, html_path = write_report({"rows": [odd]}, tmp_path)
    written = json.loads(json_path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))["rows"][
        0
    ]
    assert written["tau"] is written["speedup_vs_generate"] is None
    assert (written["tokens_per_second"], written["num_tokens"], written["lossless"]) == (2.5, 7, True)
    assert written["acceptance_by_position"] == [0.5, None]
    assert written["phases_ms"]["propose"] is None
    assert "nan" not in re.sub(r"<style.*?</style>", "", Page(html_path.read_text()).text.lower())


def test_long_training_logs_are_averaged(tmp_path: Path) -> None:
    steps = list(range(20_000))
    report = full_report() | {"training": {"moa": {"step": steps, "loss": [1.0 + step % 2 for step in steps]}}}
    page = page_of(report, tmp_path)
    assert "mean of 67 logged values" in page.text
    assert (tmp_path / "report.html").stat().st_size < 200_000
    assert len(json.loads((tmp_path / "report.json").read_text())["training"]["moa"]["loss"]) == 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [row(tua=1.0)]}, "unknown key 'rows.0.tua'"),
        ({"rows": [{"drafter": "moa"}]}, r"'rows.0.tree' is missing; .* \(and 8 more problems\)"),
        ({"rows": [row(), row(tau="3.5")]}, "'rows.1.tau' is \"3.5\""),
        ({"rows": [row(num_prompts=-1)]}, "'rows.0.num_prompts' is -1"),
        ({"rows": [row(lossless="yes")]}, "'rows.0.lossless' is \"yes\""),
        ({"training": {"moa": {"loss": [1.0]}}}, "training of 'moa' has no series 'step'"),
        ({"validation": {"moa": {"step": [1], "tokens": [9]}}}, "validation of 'moa' has no series 'seconds'"),
        ({"training": {"moa": {"step": [1], "kl": [1.0, 2.0]}}}, "'kl' has 2 values but 'step' has 1; put null"),
    ],
)
def test_wrong_reports_are_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        write_report(full_report() | change, tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written to '.*file'"):
        write_report(full_report(), tmp_path / "file")


def test_ideal_speedup_is_the_one_of_the_design() -> None:
    report = read_report({"rows": [row(tau=4.22, draft_steps=6.0, draft_cost=0.10), row(draft_cost=None)]})
    assert isinstance(report, Report)
    assert report.rows[0].ideal_speedup == pytest.approx(2.64, abs=0.005)  # decoding.md, "The limit"
    assert report.rows[1].ideal_speedup is None


def test_console_shows_the_figures_and_marks_a_loss_of_text_in_red() -> None:
    text = console_text(full_report(), width=140)
    for shown in ("dynamic(6, 8, 30)", "4.50", "1.75x", "2.60x", "90 %", "1,280", "not checked", "note: batch 1"):
        assert shown in text
    colours = console_text(full_report(), width=140, force_terminal=True, color_system="standard")
    assert re.search(r"\x1b\[1;31mNO", colours)
    assert re.search(r"\x1b\[32myes", colours)


def category_table(text: str) -> list[list[str]]:
    """The cells of the console's table by category: header, categories, mean."""
    lines = text[text.index("by category") :].splitlines()[1:]
    rows = [[cell.strip() for cell in re.split(r"\s{2,}", line.strip())] for line in lines]
    return [row for row in rows if len(row) > 1]


def test_console_shows_one_line_per_category_for_the_fastest_tree_of_each_drafter() -> None:
    rows = [
        row(speedup_vs_plain=1.5),
        row(tree="dynamic", speedup_vs_plain=2.5),
        row(tree="unmeasured", speedup_vs_plain=None),
        row(drafter="eagle", tree="star", speedup_vs_plain=1.2),
    ]
    categories = [
        category(name, factor * speedup, factor * tau, drafter=drafter, tree=tree)
        for drafter, tree, factor in (
            ("moa", "chain(4)", 0.1), ("moa", "dynamic", 1.0), ("moa", "unmeasured", 0.2), ("eagle", "star", 0.5)
        )
        for name, speedup, tau in (("qa", 1.6, 3.2), ("rag", 2.0, 4.0))
    ]  # fmt: skip
    text = console_text(full_report() | {"rows": rows, "categories": categories})
    assert text.count("by category") == 1
    assert category_table(text) == [
        ["category", "moa, dynamic", "eagle, star", "prompts"],
        ["qa", "1.60 / 3.20", "0.800 / 1.60", "10"],
        ["rag", "2.00 / 4.00", "1.00 / 2.00", "10"],
        ["mean", "1.80 / 3.60", "0.900 / 1.80", "20"],
    ]


def test_a_category_that_one_drafter_was_not_asked_has_a_dash() -> None:
    categories = [category("qa", 1.6, 3.2), category("rag", 2.0, 4.0, drafter="eagle", num_prompts=3)]
    table = category_table(console_text(full_report() | {"categories": categories}))
    assert table[1:3] == [["qa", "1.60 / 3.20", "-", "10"], ["rag", "-", "2.00 / 4.00", "3"]]


def test_console_leaves_the_categories_out_where_there_are_none() -> None:
    assert "by category" not in console_text(full_report() | {"categories": []})


def test_a_narrow_console_shows_many_drafters_by_speed_alone_and_how_they_were_trained() -> None:
    names = ("moa", "eagle", "glide", "medusa")
    rows = [
        row(drafter=name, trainable_parameters=1234567, training_tokens=600000, training_seconds=75.5) for name in names
    ]
    categories = [category("qa", 1.6, 3.2, drafter=name) for name in names]
    text = console_text(full_report() | {"rows": rows, "categories": categories}, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert category_table(text)[:2] == [["category", *names, "prompts"], ["qa", *["1.60"] * 4, "10"]]
    for name in names:
        assert re.search(rf"{name} +1,234,567 +600,000 +75\.5", text)
        assert f"{name}: chain(4)" in text


def test_a_narrow_console_loses_no_category() -> None:
    report = full_report() | {"categories": [category(f"category{number}", 1.0 + number, 2.0) for number in range(13)]}
    text = console_text(report, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for number in range(13):
        assert f"category{number}" in text
        assert f"{1 + number:.2f}"[:4] in text
