"""The demo's chats: deterministic, varied, in the right schema, and held-out prompts never trained on."""

import hashlib
import re
from collections import Counter

import pytest

from moray.targets.demo.chats import DemoChat, generate_chats, generate_questions
from moray.targets.demo.make import RECIPE


@pytest.fixture(scope="module")
def train_chats() -> list[DemoChat]:
    return list(generate_chats(4000, seed=0, heldout=False))


@pytest.fixture(scope="module")
def heldout_chats() -> list[DemoChat]:
    return list(generate_chats(400, seed=0, heldout=True))


def test_same_seed_same_chats_other_seed_other_chats(train_chats: list[DemoChat]) -> None:
    assert list(generate_chats(300, seed=0, heldout=False)) == train_chats[:300]
    assert list(generate_chats(300, seed=1, heldout=False)) != train_chats[:300]


@pytest.mark.parametrize("other_seed", [0, 1, 7])
def test_heldout_prompts_are_never_trained_on_whatever_the_seed(heldout_chats: list[DemoChat], other_seed: int) -> None:
    trained = {chat.prompt for chat in generate_chats(4000, seed=other_seed, heldout=False)}
    assert trained.isdisjoint(chat.prompt for chat in heldout_chats)
    asked = {question["turns"][0] for question in generate_questions(78, seed=0)}  # type: ignore[index]
    assert trained.isdisjoint(asked)


def test_a_greeting_does_not_move_a_prompt_to_the_other_side(train_chats: list[DemoChat]) -> None:
    bare = [chat for chat in train_chats if chat.prompt.startswith(("What", "Which", "How", "Count", "Tell"))]
    assert len(bare) > 200
    for chat in bare:
        assert not DemoChat(chat.category, (("Hello! " + chat.prompt, "answer"),)).is_heldout


def test_rows_follow_the_ultrachat_schema(train_chats: list[DemoChat]) -> None:
    for chat in train_chats[:500]:
        row = chat.as_row()
        messages = row["messages"]
        assert isinstance(messages, list)
        assert row["prompt"] == messages[0]["content"]
        assert row["prompt_id"] == hashlib.sha256(str(row["prompt"]).encode()).hexdigest()
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in messages)


def test_chats_vary_in_topic_length_prompt_and_answer(train_chats: list[DemoChat]) -> None:
    by_category = Counter(chat.category for chat in train_chats)
    assert len(by_category) >= 10
    assert max(by_category.values()) < 2 * min(by_category.values())
    assert set(Counter(len(chat.turns) for chat in train_chats)) == {1, 2, 3, 4}
    for category in by_category:
        first_turns = [chat.turns[0] for chat in train_chats if chat.category == category]
        assert len({question for question, _ in first_turns}) > 90
        # Not canned: no answer stands for more than a quarter of a category's first questions.
        assert Counter(answer for _, answer in first_turns).most_common(1)[0][1] < len(first_turns) / 4


def test_sums_and_conversions_are_right(train_chats: list[DemoChat]) -> None:
    answers = [answer for chat in train_chats for _, answer in chat.turns]
    checked = 0
    for answer in answers:
        for left, sign, right, result in re.findall(r"(?<![+\d] )\b(\d+) ([+x-]) (\d+) = (\d+)", answer):
            expected = {"+": int(left) + int(right), "-": int(left) - int(right), "x": int(left) * int(right)}[sign]
            assert int(result) == expected, answer
            checked += 1
    assert checked > 500


def test_questions_are_distinct_cover_the_categories_and_some_have_two_turns() -> None:
    questions = generate_questions(78, seed=0)
    assert [question["question_id"] for question in questions] == list(range(1, 79))
    assert len({question["category"] for question in questions}) >= 6
    turns = [question["turns"] for question in questions]
    assert len({first for first, *_ in turns}) == 78  # type: ignore[misc]
    assert {len(turn) for turn in turns} == {1, 2}  # type: ignore[arg-type]


def test_chats_of_one_recipe_never_change() -> None:
    """A demo target of an earlier recipe counts as finished: chats that change must come with a new RECIPE."""
    texts = [str(chat.as_row()) for chat in generate_chats(200, seed=0, heldout=False)]
    texts += [str(question) for question in generate_questions(26, seed=0)]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    assert (RECIPE, digest) == (4, "15504e3e8d292c5e"), "raise RECIPE, then note both values here"
