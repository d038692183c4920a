"""What becomes of a chat that the target answers: its turns, its end, and what it is counted as."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from side_by_side import MoodyCosts
from tiny_drafters import SEVERAL_LAYER_COUNTS, VARIANTS, build
from tiny_targets import TinyTarget, save_chat_target

from moray.cluster.caching.answer_store import AnsweredChat, AnswerSummary
from moray.cluster.caching.dialogues import Dialogue, answer_chats, answering_engine
from moray.cluster.caching.regenerate_config import RegenerateConfig
from moray.config import validate
from moray.data.ultrachat import BadRow, Chat
from moray.decoding.engine import engine as engine_module
from moray.decoding.planning.controller import SpeculationController
from moray.errors import ConfigError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer, Message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(str(folder))


def chat(*contents: str, uid: str = "chat", system: str | None = None) -> Chat:
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], content=text) for i, text in enumerate(contents)]
    return Chat(uid, ([Message(role="system", content=system)] if system else []) + messages)


def answer(tokenizer: ChatTokenizer, text: str, *, is_whole: bool = True) -> tuple[list[int], bool]:
    ids = tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ([*ids, tokenizer.eos_ids[0]] if is_whole else ids), is_whole


def settings(folder: Path, **changes: Any) -> RegenerateConfig:
    base = {"target": {"model": str(folder)}, "chats": {"path": "x"}, "output": "x"}
    sizes = {"max_new_tokens": 20, "max_length": 120, "batch_tokens": 512}
    return validate(RegenerateConfig, base | sizes | changes)


def answered_by(
    target: Target, rows: Sequence[Chat | BadRow], tokenizer: ChatTokenizer, config: RegenerateConfig, eos: Any = ()
) -> tuple[list[AnsweredChat], AnswerSummary]:
    return answer_chats(rows, answering_engine(target, eos, config), tokenizer, config)


def test_later_questions_follow_the_target_s_own_answers(tokenizer: ChatTokenizer) -> None:
    dialogue = Dialogue(chat("a", "theirs", "b", "theirs too", "c", system="s"), None)
    first = dialogue.next_prompt(tokenizer, 100)
    assert first == tokenizer.encode_prompt([Message(role="system", content="s"), Message(role="user", content="a")])
    dialogue.take(*answer(tokenizer, "own"), tokenizer, keep_truncated=True)
    second = dialogue.next_prompt(tokenizer, 100)
    assert second is not None
    assert "own" in tokenizer.decode(second)
    assert "theirs" not in tokenizer.decode(second)
    dialogue.take(*answer(tokenizer, "cut", is_whole=False), tokenizer, keep_truncated=True)
    assert dialogue.next_prompt(tokenizer, 100) is not None
    dialogue.take(*answer(tokenizer, "end"), tokenizer, keep_truncated=True)
    assert dialogue.next_prompt(tokenizer, 100) is None
    assert [m["content"] for m in dialogue.messages] == ["s", "a", "own", "b", "cut", "c", "end"]
    assert dialogue.row["prompt"] == "a"
    assert dialogue.row["finish_reasons"] == ["eos", "length", "eos"]
    assert (dialogue.cut, dialogue.lack) == (None, None)


def test_a_question_that_is_too_long_ends_the_chat_or_drops_it(tokenizer: ChatTokenizer) -> None:
    dialogue = Dialogue(chat("a", "x", "b" * 50, "theirs"), None)
    assert dialogue.next_prompt(tokenizer, 40) is not None
    assert dialogue.lack == "without_question", "nothing is settled yet"
    dialogue.take(*answer(tokenizer, "own"), tokenizer, keep_truncated=True)
    assert dialogue.next_prompt(tokenizer, 40) is None
    assert (dialogue.cut, dialogue.lack) == ("too_long", None)
    assert [m["content"] for m in dialogue.messages] == ["a", "own"]
    dropped = Dialogue(chat("b" * 50, "theirs"), None)
    assert dropped.next_prompt(tokenizer, 40) is None
    assert dropped.lack == "too_long"


def test_a_truncated_answer_is_left_out_where_that_is_asked_for(tokenizer: ChatTokenizer) -> None:
    dialogue = Dialogue(chat("a", "x", "b", "y", "c", "z"), None)
    dialogue.take(*answer(tokenizer, "own"), tokenizer, keep_truncated=False)
    dialogue.take(*answer(tokenizer, "cut", is_whole=False), tokenizer, keep_truncated=False)
    assert dialogue.next_prompt(tokenizer, 100) is None
    assert [m["content"] for m in dialogue.messages] == ["a", "own"]
    assert (dialogue.cut, dialogue.lack) == ("truncated", None)


def test_half_a_character_at_the_end_is_left_out(tokenizer: ChatTokenizer) -> None:
    tokens, _ = answer(tokenizer, "caf\u00e9", is_whole=False)
    dialogue = Dialogue(chat("a", "x"), None)
    dialogue.take(tokens[:-1], False, tokenizer, keep_truncated=True)
    assert dialogue.messages[-1]["content"] == "caf"


def test_every_row_is_accounted_for(folder: Path, tokenizer: ChatTokenizer) -> None:
    target = Target.load(TargetConfig(model=str(folder)))
    rows = [
        chat("one", "x", "two", "y", uid="1"),
        BadRow("f", 2, "no chat"),
        chat("a" * 200, "x", uid="3"),
        chat("three", "x", "b" * 200, "y", uid="4"),
    ]
    eos = set(tokenizer.eos_ids)
    answered, summary = answered_by(target, rows, tokenizer, settings(folder), eos)
    assert [row["uid"] for row in answered] == ["1", "4"]
    assert summary.bad_rows == ["f, row 2: no chat"]
    assert (summary.rows, summary.chats, summary.bad) == (4, 2, 1)
    assert (summary.dropped, summary.shortened) == ({"too_long": 1}, {"too_long": 1})
    assert sum(summary.finish_reasons.values()) == 3
    one_turn, _ = answered_by(target, rows, tokenizer, settings(folder, max_turns=1), eos)
    assert [len(row["messages"]) for row in one_turn] == [2, 2]
    assert one_turn[0]["messages"] == answered[0]["messages"][:2]
    whole, counts = answered_by(target, rows, tokenizer, settings(folder, keep_truncated=False), eos)
    assert set(counts.finish_reasons) <= {"eos"}
    assert counts.dropped.get("truncated", 0) + len(whole) == 2


def test_sampled_answers_do_not_depend_on_their_part(folder: Path, tokenizer: ChatTokenizer) -> None:
    target = Target.load(TargetConfig(model=str(folder)))
    rows = [chat(text, "x", "more", "y", uid=text) for text in ("one", "two", "three", "four")]
    config = settings(folder, sampling={"temperature": 1.0, "seed": 3})
    together, _ = answered_by(target, rows, tokenizer, config)
    alone = [answered_by(target, [row], tokenizer, config)[0][0] for row in rows]
    assert together == alone
    assert len({row["messages"][1]["content"] for row in together}) == 4


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("variant", [*SEVERAL_LAYER_COUNTS[:1], "eagle-0"])
@pytest.mark.parametrize(
    "tree",
    [
        {"type": "dynamic", "depth": 3, "breadth": 3, "nodes": 8},
        {"type": "adaptive", "depth": 3, "breadth": 3, "nodes": 8},
    ],
    ids=["dynamic", "adaptive"],
)
def test_drafts_do_not_change_the_answers(
    folder: Path,
    tokenizer: ChatTokenizer,
    tree: dict[str, Any],
    variant: str,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is kept from part to part. Costs change at every look, so that an adaptive tree has another size and
    another N in every cycle."""
    monkeypatch.setattr(engine_module, "measure_costs", lambda *_: MoodyCosts())
    monkeypatch.setattr(engine_module.Engine, "has_exact_phases", False)
    monkeypatch.setattr(SpeculationController, "record_cycle", lambda *_: None)
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    drafter = build(TinyTarget("chat", folder, target), VARIANTS[variant])
    parts = [[chat(text, "x", "more", "y", uid=text) for text in part] for part in (("one", "two"), ("three",))]
    config = settings(folder, drafter=variant, tree=tree, sampling=sampling)
    engine = answering_engine(target, (), config, drafter)
    for part in parts:
        wanted, _ = answered_by(target, part, tokenizer, config)
        assert answer_chats(part, engine, tokenizer, config)[0] == wanted
    assert engine.stats.num_draft_tokens > 0
    (scheduler,) = engine.draft_schedulers.values()
    assert scheduler.controller._layer_counts == drafter.layer_counts
    assert not scheduler.controller.needs_costs


def test_settings_that_leave_no_room_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        settings(folder, max_length=20)
    with pytest.raises(ConfigError, match="one chat must fit"):
        settings(folder, batch_tokens=100)


def test_a_tree_without_a_drafter_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tree has no effect without a drafter"):
        settings(folder, tree={"type": "chain", "depth": 3})


def test_a_chat_with_a_token_that_the_target_lacks_is_a_bad_row(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "target")
    bigger = ChatTokenizer.load(str(folder)).tokenizer
    bigger.add_tokens(["<extra>"])
    bigger.save_pretrained(tmp_path / "target")
    target = Target.load(TargetConfig(model=str(tmp_path / "target"), device="cpu"))
    tokenizer = ChatTokenizer.load(str(tmp_path / "target"))
    rows = [chat("a", "b", uid="good"), chat("a <extra>", "b", uid="strange")]
    _, summary = answered_by(target, rows, tokenizer, settings(folder))
    assert (summary.rows, summary.bad) == (2, 1)
    assert summary.bad_rows[0].startswith(f"chat 'strange': the text holds token {target.spec.vocab_size} (")
