"""Chats packed into one file: shuffled, filtered, as many as fit, the same for the same command."""

import json
from pathlib import Path

import pytest

from moray.data.pack import PackConfig, pack_chats
from moray.data.ultrachat import Chat, ChatsConfig, plan_chunks, read_chunk
from moray.errors import DataError


@pytest.fixture
def chats(tmp_path) -> Path:
    rows = [
        {
            "prompt_id": str(number),
            "messages": [
                {"role": "user", "content": "q" * number + f" {number * 7919 % 1009}"},
                {"role": "assistant", "content": f"answer {number * number}"},
            ],
        }
        for number in range(1, 201)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "damaged"]), encoding="utf-8")
    return path


def packed(path: Path, chats: Path, **changes) -> list[Chat]:
    told = pack_chats(PackConfig(chats=ChatsConfig(path=str(chats)), output=path, **changes))
    assert told["bytes"] == path.stat().st_size
    assert told["bad"] == 1
    rows = [row for chunk in plan_chunks(ChatsConfig(path=str(path))) for row in read_chunk(chunk)]
    found = [row for row in rows if isinstance(row, Chat)]
    assert len(found) == len(rows) == told["packed"]
    return found


def test_every_chat_is_there_once_in_another_order(chats, tmp_path):
    before = [
        row.messages
        for chunk in plan_chunks(ChatsConfig(path=str(chats)))
        for row in read_chunk(chunk)
        if isinstance(row, Chat)
    ]
    after = [chat.messages for chat in packed(tmp_path / "one.parquet", chats)]
    assert after != before
    assert sorted(after, key=str) == sorted(before, key=str)
    packed(tmp_path / "two.parquet", chats)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    packed(tmp_path / "three.parquet", chats, seed=1)
    assert (tmp_path / "one.parquet").read_bytes() != (tmp_path / "three.parquet").read_bytes()


def test_distinct_keeps_the_first_chat_of_each_question(tmp_path):
    rows = [
        {
            "prompt_id": str(number),
            "messages": [
                {"role": "user", "content": f"question {number % 7}"},
                {"role": "assistant", "content": f"answer {number}"},
            ],
        }
        for number in range(20)
    ]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join([*map(json.dumps, rows), "damaged"]), encoding="utf-8")
    once = packed(tmp_path / "once.parquet", asked, distinct=True)
    assert sorted(chat.messages[1]["content"] for chat in once) == [f"answer {number}" for number in range(7)]
    assert len(packed(tmp_path / "all.parquet", asked)) == 20


def test_filters_and_limits(chats, tmp_path):
    found = packed(tmp_path / "some.parquet", chats, min_chars=20, max_chars=60)
    lengths = [len(chat.messages[0]["content"]) for chat in found]
    assert 30 < len(lengths) < 60
    assert all(20 <= length <= 60 for length in lengths)
    assert len(packed(tmp_path / "few.parquet", chats, max_packed=7)) == 7
    whole = (tmp_path / "whole.parquet", packed(tmp_path / "whole.parquet", chats))
    limit = whole[0].stat().st_size * 2 // 3
    fitting = packed(tmp_path / "fitting.parquet", chats, max_bytes=limit)
    assert 10 < len(fitting) < len(whole[1])
    assert (tmp_path / "fitting.parquet").stat().st_size <= limit
    assert [chat.messages for chat in fitting] == [chat.messages for chat in whole[1][: len(fitting)]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_chars": 5_000}, "of 200 chats of .* none is left"),
        ({"max_bytes": 1_024}, "one chat takes"),
        ({"chats": {"max_bad_rows": 0}}, "1 rows cannot be used"),
    ],
)
def test_what_leaves_nothing_is_said(changes, said, chats, tmp_path):
    more = ChatsConfig(path=str(chats), **changes.pop("chats", {}))
    with pytest.raises(DataError, match=said):
        pack_chats(PackConfig(chats=more, output=tmp_path / "none.parquet", **changes))
    assert not (tmp_path / "none.parquet").exists()
