"""The demo target's chats: a deterministic generator of multi-turn conversations with real structure.

A laptop without a network has no chat corpus, and a drafter can only be judged on text whose next words depend on
earlier ones. So each scene answers from a table of facts (`scenes`) or by working something out (`exercises`), in
recurring wordings, with follow-up questions that refer back. Prompts are split into training and held-out by their
hash, so that no prompt is in both. This module does not know tokenizers, models or file layout; it is pure Python.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from moray.targets.demo import exercises, scenes
from moray.targets.demo.facts import OPENERS
from moray.targets.demo.scenes import Scene, Turn, thanks

SCENES: dict[str, Scene] = {
    "arithmetic": exercises.arithmetic,
    "lists": exercises.lists,
    "conversion": exercises.conversion,
    "facts": scenes.facts,
    "animals": scenes.animals,
    "comparison": scenes.comparison,
    "definitions": scenes.definitions,
    "story": scenes.story,
    "rewriting": scenes.rewriting,
    "clock": exercises.clock,
    "counting": exercises.counting,
    "recipes": scenes.recipe,
    "small_talk": scenes.small_talk,
}
"""By category; chats are drawn in this order, so changing the order changes every chat."""

HELDOUT_SHARE = 8  # one prompt in this many is held out, whatever the seed


@dataclass(frozen=True)
class DemoChat:
    """One conversation; the roles alternate, starting with the user."""

    category: str
    turns: tuple[Turn, ...]

    @property
    def prompt(self) -> str:
        """The user's first message, which identifies the chat."""
        return self.turns[0][0]

    @property
    def prompt_id(self) -> str:
        """SHA-256 of the prompt, as in HuggingFaceH4/ultrachat_200k."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    @property
    def is_heldout(self) -> bool:
        """Whether the prompt is on the held-out side of the split; a greeting before it makes no difference."""
        question = self.prompt
        for opener in OPENERS:
            question = question.removeprefix(opener)
        return int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) % HELDOUT_SHARE == 0

    def as_row(self) -> dict[str, object]:
        """The chat in the schema of HuggingFaceH4/ultrachat_200k."""
        messages = [
            {"content": text, "role": role}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return {"prompt": self.prompt, "prompt_id": self.prompt_id, "messages": messages}


def generate_chats(num_chats: int, seed: int, heldout: bool) -> Iterator[DemoChat]:
    """Yield `num_chats` conversations of one side of the split; the same seed gives the same chats."""
    rng = random.Random(f"{seed}/{heldout}")
    categories = list(SCENES)
    while num_chats > 0:
        category = rng.choice(categories)
        turns = SCENES[category](rng)
        turns = turns[: rng.randint(1, min(len(turns), 4))]
        if len(turns) < 4 and rng.random() < 0.25:
            turns.append(thanks(rng, category))
        chat = DemoChat(category, tuple(turns))
        if chat.is_heldout == heldout:
            num_chats -= 1
            yield chat


def generate_questions(num_questions: int, seed: int) -> list[dict[str, object]]:
    """Held-out prompts as Spec-Bench rows, spread evenly over the categories, no prompt twice.

    Every third question has two turns if its scene has a second one.
    """
    rows: list[dict[str, object]] = []
    seen: set[str] = set()
    wanted = {category: num_questions // len(SCENES) for category in SCENES}
    for category in list(SCENES)[: num_questions % len(SCENES)]:
        wanted[category] += 1
    rng = random.Random(f"{seed}/questions")
    for category, count in wanted.items():
        while count > 0:
            chat = DemoChat(category, tuple(SCENES[category](rng)))
            if not chat.is_heldout or chat.prompt in seen:
                continue
            seen.add(chat.prompt)
            num_turns = 2 if len(rows) % 3 == 2 else 1
            asked = [user for user, _ in chat.turns[:num_turns]]
            rows.append({"question_id": len(rows) + 1, "category": category, "turns": asked})
            count -= 1
    return rows
