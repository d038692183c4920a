"""Regenerated chats: the user's turns as they were, every answer the target's own one, every row accounted for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from replica_killer import ReplicaKiller

from moray.activations.capture.attempts import MAX_ATTEMPTS
from moray.cluster.caching.regenerate_config import AnswerSampling, RegenerateConfig
from moray.data.ultrachat import BadRow, ChatsConfig, plan_chunks, read_chunk
from moray.errors import ConfigError, DataError, MismatchError
from moray.targets.spec import TargetConfig

MAX_NEW_TOKENS = 12
NUM_CHATS = 7
SAMPLED = AnswerSampling(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def chats(write_chats: Callable[[Path, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("asked") / "chats.jsonl", NUM_CHATS)


def _regenerate(target: Path, asked: Path, output: Path, **changes: Any) -> dict[str, Any]:
    from moray.cluster.caching.regenerate import regenerate

    settings: dict[str, Any] = {
        "target": TargetConfig(model=str(target)),
        "chats": ChatsConfig(path=str(asked)),
        "output": str(output),
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_length": 500,
        "batch_tokens": 768,
        "chats_per_part": 3,
    }
    return regenerate(RegenerateConfig(**settings | changes))


def _rows(output: Path) -> list[dict[str, Any]]:
    """All chats, in order."""
    parts = sorted(output.glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def answered(ray_session: None, tiny_target: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all answers. Not to be written to."""
    output = tmp_path_factory.mktemp("regenerated") / "answered"
    total = _regenerate(tiny_target, chats, output)
    assert (total["rows"], total["chats"], total["bad"], total["dropped"]) == (NUM_CHATS, NUM_CHATS, 0, {})
    assert len(list(output.glob("part-*.jsonl"))) == 3
    return output


def test_answers_that_leave_no_room_for_a_question_are_refused(tiny_target: Path, chats: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens is 99999, but chats of at most \d+ tokens"):
        _regenerate(tiny_target, chats, tmp_path, max_new_tokens=99_999, max_length=100_000, batch_tokens=100_000)


@pytest.mark.parametrize("sampling", [AnswerSampling(), SAMPLED], ids=["greedy", "sampled"])
def test_every_answer_is_the_target_s_own(
    sampling: AnswerSampling, tiny_target: Path, chats: Path, answered: Path, tmp_path: Path
) -> None:
    from moray.cluster.caching.dialogues import _sequence
    from moray.decoding.plain import PlainDecoder
    from moray.targets.model import Target
    from moray.text import ChatTokenizer

    output = answered
    if sampling.temperature:
        output = tmp_path / "sampled"
        _regenerate(tiny_target, chats, output, sampling=sampling, num_targets=2, batch_tokens=512)
    target, text = Target.load(TargetConfig(model=str(tiny_target))), ChatTokenizer.load(str(tiny_target))
    decoder = PlainDecoder(target, 512)
    eos = {*target.eos_ids, *text.eos_ids}
    for number, (line, row) in enumerate(zip(chats.read_text("utf-8").splitlines(), _rows(output), strict=True)):
        asked, messages = json.loads(line)["messages"], row["messages"]
        assert row["uid"] == f"chats.jsonl#{number + 1}#chat-{number}"
        assert [m["role"] for m in messages] == [m["role"] for m in asked]
        assert [m["content"] for m in messages[::2]] == [m["content"] for m in asked[::2]]
        assert len(row["finish_reasons"]) == len(messages) // 2
        for turn, reason in zip(range(1, len(messages), 2), row["finish_reasons"], strict=True):
            prompt = text.encode_prompt(messages[:turn])
            sequence = _sequence(row["uid"], turn // 2)
            generation = decoder.generate(prompt, sampling.params, MAX_NEW_TOKENS, eos, sequence=sequence)
            answer = text.decode(generation.tokens)
            if reason == "length":
                assert generation.finish_reason == "length"
                answer = answer.rstrip("\ufffd")
            assert messages[turn]["content"] == answer


def test_only_missing_parts_are_made_again(tiny_target: Path, chats: Path, answered: Path, tmp_path: Path) -> None:
    output = shutil.copytree(answered, tmp_path / "answered")
    (output / "part-00001.yaml").unlink()
    (output / "part-00001.jsonl").write_text("half a par")
    (output / "part-00001.jsonl.12345678.tmp").write_text("half")
    kept = output / "part-00000.jsonl"
    before = kept.stat().st_mtime_ns
    _regenerate(tiny_target, chats, output, batch_tokens=512, num_targets=2)
    assert _rows(output) == _rows(answered)
    assert kept.stat().st_mtime_ns == before
    assert not list(output.glob("*.tmp"))
    with pytest.raises(MismatchError, match=r"max_new_tokens = 12, now it is 13"):
        _regenerate(tiny_target, chats, output, max_new_tokens=13)


def test_the_folder_is_read_as_chats_and_nothing_else_in_it(answered: Path) -> None:
    chunks = plan_chunks(ChatsConfig(path=str(answered)))
    chats = [chat for chunk in chunks for chat in read_chunk(chunk)]
    rows = _rows(answered)
    assert len(chats) == len(rows) == NUM_CHATS
    for chat, row in zip(chats, rows, strict=True):
        assert not isinstance(chat, BadRow)
        assert chat.messages == row["messages"]
        assert chat.uid.endswith(row["uid"]), "a cache names the source row"
    record = yaml.safe_load((answered / "run.yaml").read_text())
    assert record["config"]["max_new_tokens"] == MAX_NEW_TOKENS
    assert json.loads((answered / "summary.yaml").read_text())["chats"] == NUM_CHATS


def test_bad_rows_are_counted_over_all_parts_and_all_runs(
    ray_session: None, tiny_target: Path, chats: Path, tmp_path: Path
) -> None:
    lines = chats.read_text(encoding="utf-8").splitlines()
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join([lines[0], "{", *lines[1:4], "[]", *lines[4:], '{"messages": 1}']) + "\n")
    output = tmp_path / "answered"

    def limit(most: int) -> ChatsConfig:
        return ChatsConfig(path=str(damaged), max_bad_rows=most)

    with pytest.raises(DataError, match=r"3 bad rows, chats.max_bad_rows allows 2; the first: .*row 2: not valid JSON"):
        _regenerate(tiny_target, damaged, output, chats=limit(2))
    assert not (output / "summary.yaml").exists()
    with pytest.raises(DataError, match=r"bad rows, chats.max_bad_rows allows 1"):
        _regenerate(tiny_target, damaged, output, chats=limit(1))
    total = _regenerate(tiny_target, damaged, output, chats=limit(3))
    assert (total["rows"], total["chats"], total["bad"]) == (NUM_CHATS + 3, NUM_CHATS, 3)


LONG_ANSWERS = {"chats_per_part": 10, "max_new_tokens": 300, "batch_tokens": 512}


@pytest.mark.soak
def test_a_dead_replica_is_replaced_and_its_part_redone(
    ray_session: None,
    tiny_target: Path,
    write_chats: Callable[[Path, int], Path],
    tmp_path: Path,
    ray_processes: Callable[[str], dict[int, str]],
    kill: Callable[[int], None],
) -> None:
    chats = write_chats(tmp_path / "many.jsonl", 20)
    output = tmp_path / "answered"
    with ReplicaKiller(output / "part-00001.attempts", 1, lambda: ray_processes("_Answerer"), kill) as killer:
        total = _regenerate(tiny_target, chats, output, **LONG_ANSWERS)
    assert len(killer.killed) == 1
    assert (total["rows"], total["chats"]) == (20, 20)
    assert [row["uid"].split("#")[1] for row in _rows(output)] == [str(number + 1) for number in range(20)]
    assert not list(output.glob("*.attempts"))


@pytest.mark.soak
def test_a_part_over_which_replicas_die_ends_the_run_and_is_named(
    ray_session: None,
    tiny_target: Path,
    write_chats: Callable[[Path, int], Path],
    tmp_path: Path,
    ray_processes: Callable[[str], dict[int, str]],
    kill: Callable[[int], None],
) -> None:
    chats = write_chats(tmp_path / "many.jsonl", 20)
    output = tmp_path / "answered"
    _regenerate(tiny_target, chats, output, **LONG_ANSWERS)
    # One part is left to do: of two, Ray may hand either to a replica first.
    for name in ("part-00001.yaml", "part-00001.jsonl", "summary.yaml"):
        (output / name).unlink()
    finished = (output / "part-00000.jsonl").stat().st_mtime_ns
    message = rf"{MAX_ATTEMPTS} target replicas died over part-00001 \(.*, 10 rows from row 11 on\)"
    with (
        ReplicaKiller(output / "part-00001.attempts", MAX_ATTEMPTS, lambda: ray_processes("_Answerer"), kill) as killer,
        pytest.raises(DataError, match=message),
    ):
        _regenerate(tiny_target, chats, output, **LONG_ANSWERS)
    assert len(killer.killed) == MAX_ATTEMPTS
    assert not (output / "part-00001.yaml").exists()
    assert _regenerate(tiny_target, chats, output, **LONG_ANSWERS)["chats"] == 20
    assert (output / "part-00000.jsonl").stat().st_mtime_ns == finished
