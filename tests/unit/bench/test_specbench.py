"""Benchmark questions: every shape of file that others ship, and every way in which one can be wrong."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moray.bench.specbench import Question, read_questions
from moray.errors import ConfigError, DataError

DATA = Path(__file__).resolve().parents[3] / "../shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no shared data beside the repository")


def write(path: Path, rows: list[Any]) -> str:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return str(path)


def spec_rows(**counts: int) -> list[dict[str, Any]]:
    """Sorted by category, as the real file is."""
    rows = []
    for category, count in counts.items():
        for number in range(count):
            rows.append(
                {"question_id": len(rows) + 81, "category": category, "turns": [f"{category} {number}", "more"]}
            )
    return rows


def test_reads_spec_bench_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "spec.jsonl", [{"question_id": 81, "category": "qa", "turns": ["a", "b"], "reference": 1}])
    assert read_questions(path) == [Question("81", "qa", ("a", "b"))]


def test_reads_the_user_turns_of_chats(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]
    path = write(tmp_path / "chats.jsonl", [{"prompt": "first", "prompt_id": "f00", "messages": messages}])
    assert read_questions(path) == [Question("f00", "chat", ("first", "second"))]


def test_reads_bare_prompts_whatever_the_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "hellaswag.json", [{"prompt": "one"}, {"prompt": "two"}])
    assert read_questions(path) == [
        Question("hellaswag:1", "hellaswag", ("one",)),
        Question("hellaswag:2", "hellaswag", ("two",)),
    ]


def test_rows_end_at_line_feeds_only(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf"
    path = tmp_path / "odd.jsonl"
    # json.dumps escapes \x0b and \x0c even with ensure_ascii=False; the others lie raw in the row.
    rows = json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n\n" + json.dumps({"prompt": "next"})
    path.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert "\u2028" in path.read_text(encoding="utf-8")
    assert [question.turns for question in read_questions(str(path))] == [(text,), ("next",)]


def test_limit_takes_an_even_number_from_every_category(tmp_path: Path) -> None:
    path = write(tmp_path / "spec.jsonl", spec_rows(qa=50, rag=50, math=2))
    counts = Counter(question.category for question in read_questions(path, limit=12))
    assert counts == {"qa": 5, "rag": 5, "math": 2}


def test_limit_does_not_take_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "spec.jsonl", spec_rows(qa=200))
    taken = {int(question.question_id) - 81 for question in read_questions(path, limit=20)}
    assert taken != set(range(20))
    assert max(taken) > 100 > min(taken)


def test_a_smaller_limit_is_a_prefix_of_a_larger_one(tmp_path: Path) -> None:
    # More rows than are kept at once, so that the pruning is exercised, too.
    path = write(tmp_path / "spec.jsonl", spec_rows(qa=3000, rag=1500))
    largest = read_questions(path, limit=900)
    for limit in (1, 2, 3, 37, 899):
        assert read_questions(path, limit=limit) == largest[:limit]
    assert len(set(largest)) == 900


def test_limit_beyond_the_file_takes_every_question_once(tmp_path: Path) -> None:
    path = write(tmp_path / "spec.jsonl", spec_rows(qa=5, rag=3))
    assert set(read_questions(path, limit=100)) == set(read_questions(path))


def test_categories_select(tmp_path: Path) -> None:
    path = write(tmp_path / "spec.jsonl", spec_rows(qa=5, rag=5, math=5))
    assert {question.category for question in read_questions(path, categories=("rag", "qa"))} == {"rag", "qa"}
    counts = Counter(question.category for question in read_questions(path, limit=4, categories=("rag", "qa")))
    assert counts == {"rag": 2, "qa": 2}


def test_unknown_category_lists_those_that_exist(tmp_path: Path) -> None:
    path = write(tmp_path / "spec.jsonl", spec_rows(qa=1, rag=1))
    with pytest.raises(DataError, match=r"category 'qaa' is not in .*; it has: qa, rag"):
        read_questions(path, categories=("qaa",))


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "spec_bench_question.jsonl", spec_rows(qa=1))
    with pytest.raises(DataError, match=r"does not exist; did you mean '.*spec_bench_question.jsonl'"):
        read_questions(str(tmp_path / "specbench_question.jsonl"))
    with pytest.raises(DataError, match="does not exist"):
        read_questions(str(tmp_path / "no" / "such" / "folder.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        read_questions(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cut of', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["a list"]', "the row is a list"),
        ('{"text": "a"}', r"the row has only \[\"text\"\]"),
        ('{"turns": "a text"}', "'turns' is \"a text\"; a list of texts is needed"),
        ('{"turns": []}', "the row asks nothing"),
        ('{"turns": ["fine", 3]}', "a turn is 3"),
        ('{"turns": ["  "]}', 'a turn is "  "'),
        (r'{"prompt": "half \ud83d"}', "a turn is"),
        ('{"prompt": null}', "a turn is null"),
        ('{"messages": ["hello"]}', "'messages' is"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "the row asks nothing"),
        ('{"turns": ["a"], "category": 7}', "'category' is 7"),
        ('{"turns": ["a"], "question_id": [1]}', r"'question_id' is \[1\]"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"rows.jsonl:3: {message}") as caught:
        read_questions(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_files_without_questions_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="holds no question"):
        read_questions(str(tmp_path / "empty.jsonl"))
    (tmp_path / "chats.parquet").write_bytes(b"PAR1\xff\xfe\x00\x80")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_questions(str(tmp_path / "chats.parquet"))
    with pytest.raises(ConfigError, match="limit is 0"):
        read_questions(str(tmp_path / "empty.jsonl"), limit=0)


@needs_data
def test_the_real_spec_bench_file() -> None:
    path = str(DATA / "questions/spec_bench_question.jsonl")
    questions = read_questions(path)
    assert len(questions) == 480
    assert Counter(len(question.turns) for question in questions) == {1: 400, 2: 80}
    assert len({question.question_id for question in questions}) == 480
    counts = Counter(question.category for question in read_questions(path, limit=26))
    assert len(counts) == 13
    assert set(counts.values()) == {2}


@needs_data
def test_the_real_prompt_and_chat_files() -> None:
    assert len(read_questions(str(DATA / "questions/hellaswag.json"))) == 10003
    chats = read_questions(str(DATA / "chats/test_sft.jsonl"))
    assert len(chats) == 610
    assert {question.category for question in chats} == {"chat"}
    assert max(len(question.turns) for question in chats) > 1


def test_reading_questions_needs_neither_torch_nor_ray() -> None:
    imports = "import moray.bench.specbench, moray.bench.reports.report, sys"
    code = f"{imports}; print({{'torch', 'ray', 'matplotlib'}} & {{*sys.modules}})"
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[3] / "platform")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "set()"


def test_the_categories_of_mt_bench_are_one_task_as_in_published_tables(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 160, "category": "humanities", "turns": ["a", "b"]},
        {"question_id": 161, "category": "translation", "turns": ["a"]},
        {"question_id": 500, "category": "writing", "turns": ["a"]},  # somebody's own
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(str(path))
    assert [q.task for q in questions] == ["mt_bench", "mt_bench", "translation", "writing"]
    assert [q.question_id for q in read_questions(str(path), categories=("writing",))] == ["81", "500"]


def test_spec_bench_has_the_six_tasks_of_its_paper(shared_data):
    questions = read_questions(str(shared_data / "questions" / "spec_bench_question.jsonl"))
    counts = Counter(question.task for question in questions)
    assert counts == dict.fromkeys(["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"], 80)
