"""Reading chats: every accepted shape and file type, chunks that add up, and bad rows that are named."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moray.config import validate
from moray.data.ultrachat import BadRow, Chat, ChatsConfig, plan_chunks, read_chunk
from moray.errors import ConfigError, DataError

REPOSITORY = Path(__file__).resolve().parents[3]
CHATS = (REPOSITORY / "../shared/data/chats").resolve()
U, A = "user", "assistant"


def row(number: int) -> dict[str, Any]:
    """A row of HuggingFaceH4/ultrachat_200k."""
    messages = [{"content": f"q{number}\u2028?", "role": U}, {"content": f'a{number}\x85 {{[\\"', "role": A}]
    return {"prompt": f"q{number}", "prompt_id": f"id{number}", "messages": messages}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    lines = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in rows)
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 1000) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def write_array(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8")
    return path


def read(path: Path | str, chats_per_chunk: int = 3, **settings: Any) -> list[Chat | BadRow]:
    chunks = plan_chunks(ChatsConfig(path=str(path), **settings), chats_per_chunk)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(0 < chunk.num_rows <= chats_per_chunk for chunk in chunks)
    # Workers take chunks in any order, each from a pickled copy.
    parts = {chunk.index: list(read_chunk(pickle.loads(pickle.dumps(chunk)))) for chunk in reversed(chunks)}
    assert all(len(parts[chunk.index]) == chunk.num_rows for chunk in chunks)
    return [item for chunk in chunks for item in parts[chunk.index]]


def turns(item: Chat | BadRow) -> list[tuple[str, str]]:
    assert isinstance(item, Chat), item
    return [(message["role"], message["content"]) for message in item.messages]


def only(tmp_path: Path, record: Any) -> Chat | BadRow:
    """Read one row behind a good one, so that the file itself is accepted."""
    return read(write_lines(tmp_path / "one.jsonl", [row(0), record]))[1]


@pytest.mark.parametrize("write", [write_lines, write_parquet, write_array])
@pytest.mark.parametrize("num_rows", [1, 3, 10])
def test_every_row_is_read_once_whatever_the_file_type(tmp_path: Path, write: Any, num_rows: int) -> None:
    suffix = {write_lines: "jsonl", write_parquet: "parquet", write_array: "json"}[write]
    file = write(tmp_path / f"chats.{suffix}", [row(number) for number in range(num_rows)])
    items = read(file)
    assert [turns(item)[1] for item in items] == [(A, f'a{number}\x85 {{[\\"') for number in range(num_rows)]
    assert [turns(item)[0] for item in items] == [(U, f"q{number}\u2028?") for number in range(num_rows)]
    assert [item.uid for item in items if isinstance(item, Chat)] == [
        f"chats.{suffix}#{number + 1}#id{number}" for number in range(num_rows)
    ]


def test_json_suffix_with_json_lines_and_byte_order_mark(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.json", [row(0), "", "   ", row(1)])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert [item.uid for item in read(file, 1) if isinstance(item, Chat)] == ["chats.json#1#id0", "chats.json#4#id1"]


@pytest.mark.parametrize("chats_per_chunk", [1, 7, 64, 1000])
def test_parquet_chunks_cross_row_groups_in_any_order(tmp_path: Path, chats_per_chunk: int) -> None:
    file = write_parquet(tmp_path / "chats.parquet", [row(number) for number in range(600)], row_group_size=270)
    assert [turns(item)[0][1] for item in read(file, chats_per_chunk)] == [f"q{n}\u2028?" for n in range(600)]
    chunks = plan_chunks(ChatsConfig(path=str(file)), chats_per_chunk)
    in_order = [item for chunk in chunks for item in read_chunk(chunk)]
    assert in_order == read(file, chats_per_chunk)


SHAPES = [
    ({"id": "7", "data": ["q", "a", "q2", "a2", "q3"]}, [(U, "q"), (A, "a"), (U, "q2"), (A, "a2"), (U, "q3")]),
    (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
            ]
        },
        [("system", "s"), (U, "q"), (A, "a")],
    ),
    (
        {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        [(U, "q"), (A, "a")],
    ),
    ({"instruction": "q", "input": "", "output": "a"}, [(U, "q"), (A, "a")]),
    ({"instruction": "q", "input": "i", "output": "a"}, [(U, "q\n\ni"), (A, "a")]),
    ({"prompt": "q", "completion": "a"}, [(U, "q"), (A, "a")]),
    ({"prompt": "q", "response": "a", "messages": None}, [(U, "q"), (A, "a")]),
    ({"system": "s", "prompt": "q", "response": "a"}, [("system", "s"), (U, "q"), (A, "a")]),
]


@pytest.mark.parametrize(("record", "expected"), SHAPES)
def test_accepted_shapes(tmp_path: Path, record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(only(tmp_path, record)) == expected


BAD_ROWS = [
    ('{"messages": [', "not valid JSON: Expecting value at character 15"),
    ("[1]", "a row is a list"),
    ({"prompt": "q"}, "no assistant turn"),
    ({"messages": [{"role": U, "content": "q"}]}, "no assistant turn"),
    ({"messages": [{"role": U, "content": "q"}, {"role": A, "content": " "}]}, "no assistant turn"),
    ({"messages": "q"}, "'messages' is a str"),
    ({"messages": ["q"]}, "turn 0 is a str"),
    ({"messages": [{"role": U, "content": "q"}, {"role": "tool", "content": "x"}]}, "turn 1 has the role 'tool'"),
    ({"data": ["q", None]}, "turn 1 is a NoneType"),
    ({"prompt": "q", "response": ["a"]}, "turn 1 is a list"),
    ('{"prompt": "q", "response": "\\ud83d"}', "turn 1 holds half a surrogate pair"),
    ({"title": "x", "text": "y"}, "unknown shape with keys 'title', 'text'; accepted are 'messages'"),
]


@pytest.mark.parametrize(("record", "reason"), BAD_ROWS)
def test_bad_row_is_handed_back_with_file_line_and_reason(tmp_path: Path, record: Any, reason: str) -> None:
    bad = only(tmp_path, record)
    assert isinstance(bad, BadRow)
    assert (bad.file, bad.row) == (str(tmp_path / "one.jsonl"), 2)
    assert bad.reason.startswith(reason)


def test_bytes_that_are_no_utf8_spoil_one_row_only(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.jsonl", [row(0), "BAD", row(2)])
    file.write_bytes(file.read_bytes().replace(b"BAD", b'{"prompt": "\xff"}'))
    good, bad, after = read(file)
    assert isinstance(bad, BadRow)
    assert bad.reason == "not UTF-8 text: byte 13 of the row"
    assert isinstance(good, Chat)
    assert isinstance(after, Chat)


def test_file_of_prompts_is_read_as_bad_rows(tmp_path: Path) -> None:
    items = read(write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"q{number}"} for number in range(30)]))
    assert [isinstance(item, BadRow) for item in items] == [True] * 30


def test_skip_and_max_count_rows_across_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [row(0), "broken", row(2), row(3)])
    write_parquet(tmp_path / "b.parquet", [row(4), row(5), row(6)])
    write_array(tmp_path / "c.json", [row(7), row(8)])

    def rows(**settings: int) -> list[str | int]:
        items = read(tmp_path, 2, **settings)
        return [item.uid.rpartition("#id")[2] if isinstance(item, Chat) else item.row for item in items]

    assert rows() == ["0", 2, "2", "3", "4", "5", "6", "7", "8"]
    assert rows(max_chats=6) == ["0", 2, "2", "3", "4", "5"]
    assert rows(skip_chats=5) == ["5", "6", "7", "8"]
    assert rows(skip_chats=4, max_chats=4) == ["4", "5", "6", "7"]
    assert rows(skip_chats=8) == ["8"]
    with pytest.raises(DataError, match=r"skip_chats is 9, but .* has only 9 rows"):
        rows(skip_chats=9)


def test_answers_that_are_not_finished_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-00000.parquet", [row(number) for number in range(8)])
    (tmp_path / "plan.yaml").write_text("target: a")
    with pytest.raises(DataError, match=r"holds unfinished answers: run pipelines.regenerate again"):
        plan_chunks(ChatsConfig(path=str(tmp_path)))
    (tmp_path / "summary.yaml").write_text("chats: 8")
    assert sum(chunk.num_rows for chunk in plan_chunks(ChatsConfig(path=str(tmp_path)))) == 8


def test_folders_and_patterns_name_files_alike_wherever_they_lie(tmp_path: Path) -> None:
    for base in ("here", "there"):
        for part in ("x", "y"):
            (tmp_path / base / "data" / part).mkdir(parents=True)
            write_lines(tmp_path / base / "data" / part / "train_sft-00000.jsonl", [row(1)])
        write_lines(tmp_path / base / "data" / "test_sft-00000.jsonl", [row(2)])
        (tmp_path / base / "data" / ".hidden.jsonl").write_text("no row")

    def uids(path: Path, **settings: str) -> list[str]:
        return [item.uid for item in read(path, **settings) if isinstance(item, Chat)]

    expected = ["test_sft-00000.jsonl#1#id2", "x/train_sft-00000.jsonl#1#id1", "y/train_sft-00000.jsonl#1#id1"]
    assert uids(tmp_path / "here" / "data") == uids(tmp_path / "there" / "data") == expected
    assert uids(tmp_path / "here" / "data", split="train_sft") == expected[1:]
    assert uids(tmp_path / "here" / "data" / "*" / "train*.jsonl") == expected[1:]
    with pytest.raises(ConfigError, match=r"split is 'train', which no file .* is named for: test_sft-00000\.jsonl"):
        uids(tmp_path / "here" / "data", split="train")


def test_plan_is_the_same_each_time_and_ignores_contents(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.jsonl", [row(number) for number in range(20)])
    config = ChatsConfig(path=str(file))
    assert plan_chunks(config, 6) == plan_chunks(config, 6)
    assert [(chunk.first_row, chunk.num_rows) for chunk in plan_chunks(config, 6)] == [(1, 6), (7, 6), (13, 6), (19, 2)]


def test_file_that_changed_after_planning_is_refused(tmp_path: Path) -> None:
    for write, name in ((write_lines, "a.jsonl"), (write_parquet, "a.parquet")):
        file = write(tmp_path / name, [row(0)])
        (chunk,) = plan_chunks(ChatsConfig(path=str(file)))
        write(file, [row(0), row(1)])
        with pytest.raises(DataError, match=r"bytes, but had .* plan again"):
            list(read_chunk(chunk))


def test_wrong_paths_and_files_are_explained(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "train.jsonl", [row(0)])

    def plan(path: Path | str, **settings: Any) -> None:
        plan_chunks(ChatsConfig(path=str(path), **settings))

    with pytest.raises(ConfigError, match=r"does not exist; did you mean '.*train\.jsonl'"):
        plan(tmp_path / "trian.jsonl")
    with pytest.raises(ConfigError, match=r"suffix is unknown; accepted are \.jsonl"):
        plan(write_lines(tmp_path / "train.jsonl.gz", [""]))
    with pytest.raises(ConfigError, match=r"holds no \.jsonl"):
        plan(tmp_path / "*.json")
    with pytest.raises(ConfigError, match="is a single file; set split to null"):
        plan(file, split="train")
    with pytest.raises(ConfigError, match="chats_per_chunk is 0"):
        plan_chunks(ChatsConfig(path=str(file)), 0)
    with pytest.raises(DataError, match="holds no row"):
        plan(write_lines(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match="holds no row"):
        plan(write_parquet(tmp_path / "empty.parquet", [row(0)][:0]))
    with pytest.raises(DataError, match=r"none of the first 2 rows .* row 1: unknown shape with keys 'text'"):
        plan(write_lines(tmp_path / "texts.jsonl", [{"text": "x"}, {"text": "y"}]))
    with pytest.raises(DataError, match="no readable Parquet file"):
        plan(write_lines(tmp_path / "text.parquet", ["PAR?"]))


def test_damaged_arrays_are_explained(tmp_path: Path) -> None:
    file = write_array(tmp_path / "chats.json", [row(0), row(1)])
    text = file.read_text(encoding="utf-8")
    file.write_text(text[:-20], encoding="utf-8")
    with pytest.raises(DataError, match="array that does not end"):
        plan_chunks(ChatsConfig(path=str(file)))
    with pytest.raises(DataError, match="something else than objects"):
        plan_chunks(ChatsConfig(path=str(write_array(tmp_path / "mixed.json", [row(0), 7, row(1)]))))
    with pytest.raises(DataError, match="something else than objects"):
        plan_chunks(ChatsConfig(path=str(write_array(tmp_path / "last.json", [row(0), "text"]))))
    file.write_text(text.replace('"prompt": "q0"', '"prompt" "q0"'), encoding="utf-8")
    bad, good = read(file)
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith("not valid JSON")
    assert isinstance(good, Chat)


def test_hub_data_sets_are_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `datasets` library loads a folder as it loads a repository of the hub; no network is needed for one."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    write_parquet(folder / "train-00000-of-00001.parquet", [row(number) for number in range(8)])
    write_parquet(folder / "test-00000-of-00001.parquet", [row(9)])
    path = f"hub:{folder}"
    items = read(path, split="train", skip_chats=1, max_chats=6)
    assert [turns(item)[0][1] for item in items] == [f"q{number}\u2028?" for number in range(1, 7)]
    assert [item.uid for item in items if isinstance(item, Chat)] == [f"{path}#{n + 1}#id{n}" for n in range(1, 7)]
    assert len(read(path, split="test")) == 1
    with pytest.raises(ConfigError, match=r"split is null, but .* has: train, test"):
        read(path)
    with pytest.raises(ConfigError, match="split is tset, but"):
        read(path, split="tset")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read(f"hub:{tmp_path}/owner/nothing")


def test_configuration_is_strict() -> None:
    assert validate(ChatsConfig, {"path": "x"}) == ChatsConfig(path="x")
    for wrong in ({}, {"path": "x", "max_chats": 0}, {"path": "x", "skip_chats": -1}, {"path": "x", "splits": "y"}):
        with pytest.raises(ConfigError):
            validate(ChatsConfig, wrong)


def test_import_is_light() -> None:
    code = (
        "import sys, moray.data.ultrachat\n"
        "loaded = {'torch', 'transformers', 'datasets', 'ray', 'pyarrow'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(REPOSITORY / "platform")})


# --- Real chats ---

REAL: Sequence[tuple[str, int, int]] = [
    ("train_sft-00000-of-00001.parquet", 18_080, 0),
    ("test_sft.jsonl", 610, 0),
    ("sgd_dialogues_ccbysa.jsonl", 4000, 0),
    ("ultrachat_200k_real_sample.jsonl", 4, 0),
    ("ultrachat_real_prompts_500.jsonl", 0, 500),
]


@pytest.mark.parametrize(("name", "num_chats", "num_bad"), REAL)
def test_real_files_are_read_whole(name: str, num_chats: int, num_bad: int) -> None:
    if not (CHATS / name).is_file():
        pytest.skip(f"{CHATS / name} is absent")
    items = [item for chunk in plan_chunks(ChatsConfig(path=str(CHATS / name)), 512) for item in read_chunk(chunk)]
    uids = [item.uid for item in items if isinstance(item, Chat)]
    assert (len(uids), len(items) - len(uids)) == (num_chats, num_bad)
    assert len(set(uids)) == len(uids)


def test_real_rows_come_out_as_json_reads_them() -> None:
    path = CHATS / "sgd_dialogues_ccbysa.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    with path.open(encoding="utf-8", newline="\n") as lines:
        expected = [[(turn["role"], turn["content"]) for turn in json.loads(line)["messages"]] for line in lines]
    assert [turns(item) for item in read(path, 333)] == expected


def test_a_glob_takes_files_and_whole_folders(tmp_path: Path) -> None:
    row = {"prompt": "a", "prompt_id": "1", "messages": [{"role": "user", "content": "a"}]}
    (tmp_path / "train-more").mkdir()
    for name in ("train.jsonl", "train-more/part-00000.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text(
            json.dumps(row | {"messages": [*row["messages"], {"role": "assistant", "content": "b"}]}) + "\n", "utf-8"
        )
    chunks = plan_chunks(ChatsConfig(path=str(tmp_path / "train*")), 10)
    assert sorted(chunk.label for chunk in chunks) == ["train-more/part-00000.jsonl", "train.jsonl"]
