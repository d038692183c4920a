"""Comparing two reports: what is shown is what they hold, and what stands between them is said."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moray.bench.reports.compare import Comparison, compare, print_comparison, write_comparison
from moray.errors import ConfigError


def row(**changes: Any) -> dict[str, Any]:
    return {
        "drafter": "moa", "tree": "chain-3", "temperature": 0.0, "tau": 4.0, "tokens_per_second": 100.0,
        "speedup_vs_plain": 2.0, "speedup_vs_generate": None, "efficiency": 0.8, "lossless": True, "num_prompts": 8,
        "num_tokens": 64,
    } | changes  # fmt: skip


def report(*rows: dict[str, Any], machine: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    settings = {
        "questions": "q.jsonl", "max_new_tokens": 96, "output": "a", "versions": {"torch": "1"}, "begun": "then",
        "sampling": {"temperature": 0.0, "seed": 0},
    } | settings  # fmt: skip
    return {"rows": rows, "machine": machine or {"cpu": "old", "memory_gib": 8}, "settings": settings}


def compared(folder: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[Comparison, str]:
    for name, values in (("a", a), ("b", b)):
        (folder / f"{name}.json").write_text(json.dumps(values))
    comparison = compare(folder / "a.json", folder / "b.json")
    buffer = io.StringIO()
    print_comparison(comparison, Console(file=buffer, width=300))
    return comparison, buffer.getvalue()


def test_rows_are_matched_by_drafter_tree_and_temperature(tmp_path):
    a = report(row(), row(temperature=1.0, tau=3.0), row(drafter="old"))
    b = report(row(temperature=1.0, tau=3.3, speedup_vs_plain=3.0), row(tree="chain-5"), row(efficiency=None))
    comparison, text = compared(tmp_path, a, b)
    assert [(r.temperature, r.tau.ratio, r.speedup_vs_plain.ratio) for r in comparison.rows] == [
        (0.0, 1.0, 1.0),
        (1.0, pytest.approx(1.1), 1.5),
    ]
    assert (comparison.only_in_a, comparison.only_in_b) == ((("old", "chain-3", 0.0),), (("moa", "chain-5", 0.0),))
    lines = [line.split() for line in text.splitlines()]
    assert ["moa", "chain-3", "0", "4.00", "4.00", "1.00", "2.00x", "2.00x", "1.00", "80", "%", "-"] in lines
    assert ["moa", "chain-3", "1", "3.00", "3.30", "1.10", "2.00x", "3.00x", "1.50", "80", "%", "80", "%"] in lines
    assert "only there: old, chain-3, T 0" in text
    assert "only there: moa, chain-5, T 0" in text
    assert "note" not in text


def category(name: str, tau: float, speedup: float, **changes: Any) -> dict[str, Any]:
    return {
        "category": name, "drafter": "moa", "tree": "chain-3", "temperature": 0.0, "tau": tau,
        "speedup_vs_plain": speedup, "num_prompts": 4, "num_tokens": 32,
    } | changes  # fmt: skip


def test_categories_are_compared_and_so_are_their_means(tmp_path):
    a = report(row()) | {"categories": [category("qa", 2.0, 1.0), category("rag", 4.0, 3.0)]}
    b = report(row()) | {"categories": [category("qa", 3.0, 2.0), category("rag", 6.0, 3.0)]}
    b["categories"].append(category("qa", 3.0, 2.0, temperature=1.0))
    comparison, text = compared(tmp_path, a, b)
    assert [(c.category, c.tau.ratio, c.speedup_vs_plain.ratio) for c in comparison.categories] == [
        ("qa", 1.5, 2.0), ("rag", 1.5, 1.0), ("mean", 1.5, 1.25)
    ]  # fmt: skip
    lines = [line.split() for line in text.splitlines()]
    assert ["moa", "chain-3", "0", "mean", "1.50", "1.25"] in lines
    b["categories"].pop(1)
    assert [c.category for c in compared(tmp_path, a, b)[0].categories] == ["qa"], "means over others say nothing"
    assert "By category" not in compared(tmp_path, report(row()), b)[1]


def test_what_was_not_the_same_is_said(tmp_path):
    same = report(row(), output="other", begun="later", git={"sha": "x"}, trees=[1])
    assert "note" not in compared(tmp_path, report(row(), trees=[2], git={"sha": "y"}), same)[1]
    other = report(
        row(num_prompts=9), machine={"cpu": "new", "memory_gib": 16}, questions="r.jsonl", max_new_tokens=48,
        versions={"torch": "2"}, sampling={"temperature": 1.0, "seed": 1},
    )  # fmt: skip
    comparison, text = compared(tmp_path, report(row()), other)
    assert [d.key for d in comparison.settings] == ["questions", "max_new_tokens", "versions.torch", "sampling.seed"]
    for shown in (
        "the machines differ (cpu old and new): tau and speed-ups are ratios",
        "not the same: max_new_tokens 96 and 48",
        "not the same: versions.torch 1 and 2",
        "not the same: questions q.jsonl and r.jsonl",
        "1 of 1 rows have another number of prompts, such as 8 and 9",
    ):
        assert f"note: {shown}" in text


def test_the_same_questions_under_another_name_are_the_same(tmp_path):
    a, b = (report(row(), questions=name, fingerprints={"questions": "1" * 64}) for name in ("q", "r"))
    assert compared(tmp_path, a, b)[0].settings == ()
    b["settings"]["fingerprints"]["questions"] = "2" * 64
    assert "not the same: fingerprints.questions 111111111111… and 222222222222…" in compared(tmp_path, a, b)[1]


def test_reports_without_a_common_row(tmp_path):
    comparison, text = compared(tmp_path, report(row()), report())
    assert comparison.rows == ()
    assert "the reports have no row in common" in text


def test_what_was_not_measured_has_no_ratio(tmp_path):
    comparison, _ = compared(tmp_path, report(row(tau=None, speedup_vs_plain=0.0)), report(row()))
    assert (comparison.rows[0].tau.ratio, comparison.rows[0].speedup_vs_plain.ratio) == (None, None)


def test_the_comparison_as_json(tmp_path):
    comparison, _ = compared(tmp_path, report(row()), report(row(tau=5.0), row(tree="x")))
    write_comparison(comparison, tmp_path / "new" / "out.json")
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert written["rows"][0]["tau"] == {"a": 4.0, "b": 5.0, "ratio": 1.25}
    assert written["only_in_b"] == [["moa", "x", 0.0]]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_comparison(comparison, tmp_path / "a.json" / "out.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[]", "is no report"),
        (b'{"rows": [{"drafter": "moa"}]}', "is no report .*'rows.0.tree' is missing"),
    ],
)
def test_a_file_that_is_no_report_is_one_line_and_exit_code_2(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad.json' {message}.*; name a report.json") as caught:
        compare(path, path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
