"""Parts of answers count once they are whole, and what cannot be written is said on one line."""

import resource
from pathlib import Path

import pytest

from moray.activations.capture.attempts import Attempts
from moray.cluster.caching.answer_store import AnswerStore, AnswerSummary
from moray.errors import DataError, MismatchError

SUMMARY = AnswerSummary(
    rows=1, chats=1, bad=0, bad_rows=[], dropped={}, shortened={}, finish_reasons={"eos": 1}, tokens=3
)


def test_a_part_counts_once_its_summary_is_there(tmp_path: Path) -> None:
    store = AnswerStore(str(tmp_path / "new"))
    store.begin({"seed": 1}, "config: {}\n")
    store.write_part("part-00000", [{"text": "\u00e9"}], SUMMARY)
    store.put("part-00001.jsonl", "{}\n")
    assert store.summaries() == {"part-00000": SUMMARY}
    assert (tmp_path / "new" / "part-00000.jsonl").read_text("utf-8") == '{"text": "\u00e9"}\n'
    store.put("part-00002.yaml", "- damaged")
    with pytest.raises(DataError, match=r"part-00002.yaml' is damaged"):
        store.summaries()
    store.put("part-00002.yaml", "rows: 1\nchats: many")
    with pytest.raises(
        DataError, match=r"part-00002.yaml' is damaged: chats: .*; remove it and run the same"
    ) as caught:
        store.summaries()
    assert "\n" not in str(caught.value)


def test_what_a_kill_left_is_gone_when_all_begins_anew(tmp_path: Path) -> None:
    store = AnswerStore(str(tmp_path))
    store.begin({}, "")
    Attempts(store).begin("part-00001")
    (tmp_path / "part-00001.jsonl.12345678.tmp").write_text("half")
    store.write_part("part-00000", [], SUMMARY)
    store.begin({}, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "part-00000.jsonl",
        "part-00000.yaml",
        "plan.yaml",
        "run.yaml",
    ]


def test_another_plan_is_refused(tmp_path: Path) -> None:
    store = AnswerStore(str(tmp_path))
    store.begin({"seed": 1, "lengths": (1, 2)}, "")
    store.begin({"seed": 1, "lengths": (1, 2)}, "other\n")
    assert (tmp_path / "run.yaml").read_text() == "", "it says who began"
    with pytest.raises(MismatchError, match="answered with seed = 1, now it is 2"):
        store.begin({"seed": 2, "lengths": (1, 2)}, "")


def test_a_full_disk_is_said_on_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = AnswerStore(str(tmp_path))
    store.begin({}, "")
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # no file may grow beyond that
    try:
        with pytest.raises(DataError, match=r"part-00000.jsonl' cannot be written: .*run the same command again"):
            store.write_part("part-00000", [{"text": "x" * (1 << 18)}], SUMMARY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
