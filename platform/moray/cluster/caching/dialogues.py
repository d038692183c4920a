"""Has the target answer the questions of chats, turn by turn, many chats at a time. Knows neither Ray nor files."""

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence

from moray.cluster.caching.answer_store import AnsweredChat, AnswerSummary
from moray.cluster.caching.regenerate_config import RegenerateConfig
from moray.data.ultrachat import BadRow, Chat
from moray.decoding.engine.config import EngineConfig
from moray.decoding.engine.draft_source import LocalDrafts
from moray.decoding.engine.engine import Engine
from moray.decoding.request import Request
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.targets.model import Target
from moray.text import ChatTokenizer, Message

_LOGGER = logging.getLogger(__name__)

KEPT_BAD_ROWS = 20
_MAX_SEQUENCES = 1024
_MAX_DRAFTING = 64
"""Maximum number of sequences with a drafter, which keeps a state for the whole length of each."""
_PREFILL_TOKENS = 4096


class Dialogue:
    """One chat: its user's questions and the target's answers so far.

    The chat's original answers are discarded: if the target cannot continue, the chat ends.
    """

    def __init__(self, chat: Chat, max_turns: int | None) -> None:
        self.uid = chat.uid
        self.messages: list[Message] = []
        """Completed turns; ends with an answer."""
        self.finish_reasons: list[str] = []
        """Finish reason of every answer: "eos" or "length"."""
        self.num_tokens = 0
        self.cut: str | None = None
        """Why the chat ended before its last question: "too_long" or "truncated"."""
        self._turns = _turns(chat.messages)[:max_turns]

    def next_prompt(self, tokenizer: ChatTokenizer, room: int) -> list[int] | None:
        """Return the tokens of the chat up to its next question; None if there is none or they exceed `room`.

        Raises:
            DataError: the chat template rejects the chat.
        """
        if not self._turns or self.cut is not None:
            return None
        prompt = tokenizer.encode_prompt([*self.messages, *self._turns[0]])
        if not 0 < len(prompt) <= room:
            self.cut = "too_long"
            return None
        return prompt

    def take(self, tokens: list[int], is_whole: bool, tokenizer: ChatTokenizer, keep_truncated: bool) -> None:
        """Append the last question and its answer; end the chat if the answer is cut off and must not be kept."""
        self.num_tokens += len(tokens)
        text = tokenizer.decode(tokens)
        if not is_whole:
            if not keep_truncated:
                self.cut = "truncated"
                return
            text = text.rstrip("\ufffd")  # an incomplete character
        self.messages += [*self._turns.pop(0), Message(role="assistant", content=text)]
        self.finish_reasons.append("eos" if is_whole else "length")

    @property
    def next_turn(self) -> list[Message]:
        """Messages of the next turn; empty if there is none."""
        return self._turns[0] if self._turns else []

    @property
    def row(self) -> AnsweredChat:
        """Line to write for the chat."""
        return {
            "prompt": next(message["content"] for message in self.messages if message["role"] == "user"),
            "prompt_id": self.uid,
            "messages": self.messages,
            "uid": self.uid,
            "finish_reasons": self.finish_reasons,
        }

    @property
    def lack(self) -> str | None:
        """Why the chat is dropped; None if it is kept."""
        if any(message["role"] == "assistant" and message["content"].strip() for message in self.messages):
            return None
        return self.cut or ("empty" if self.messages else "without_question")


def answering_engine(
    target: Target, eos_ids: Collection[int], config: RegenerateConfig, drafter: Drafter | None = None
) -> Engine:
    """The engine that answers chats. With a drafter it first measures what passes and drafts cost.

    Raises:
        ConfigError: the drafter cannot draft such trees.
    """
    limits = EngineConfig(
        max_num_seqs=_MAX_SEQUENCES,
        kv_cache_tokens=config.batch_tokens,
        max_num_batched_tokens=_PREFILL_TOKENS,
        batch_admissions=True,
    )
    if drafter is None:
        return Engine(target, limits, eos_ids)
    context = _context(config, target)
    num_seqs = min(_MAX_DRAFTING, config.batch_tokens // context)
    room = num_seqs * (1 + config.tree.num_nodes)  # for the nodes of one tree each
    with_drafts = {"max_num_seqs": num_seqs, "kv_cache_tokens": config.batch_tokens + room, "tree": config.tree}
    drafts = {"drafter": LocalDrafts(drafter, context, config.tree.num_expanded)}
    engine = Engine(target, limits.model_copy(update=with_drafts), eos_ids, drafts=drafts)
    for notice in (notice for scheduler in engine.draft_schedulers.values() for notice in scheduler.notices):
        _LOGGER.warning(notice)
    engine.measure_costs({"drafter": drafter})
    return engine


def answer_chats(
    rows: Sequence[Chat | BadRow], engine: Engine, tokenizer: ChatTokenizer, config: RegenerateConfig
) -> tuple[list[AnsweredChat], AnswerSummary]:
    """Answer the chats of one part; return the rows to write, in order, and a summary of all rows."""
    bad = [str(row) for row in rows if isinstance(row, BadRow)]
    dialogues = [Dialogue(row, config.max_turns) for row in rows if not isinstance(row, BadRow)]
    room = _context(config, engine.target) - config.max_new_tokens
    asked: dict[int, Dialogue] = {}
    answers: dict[int, list[int]] = {}
    refused: set[str] = set()

    def ask(dialogue: Dialogue) -> None:
        try:
            prompt = dialogue.next_prompt(tokenizer, room)
        except DataError as error:
            refused.add(dialogue.uid)
            bad.append(f"chat '{dialogue.uid}': {error}")
            return
        if prompt is not None:
            request = Request(
                prompt=tuple(prompt),
                params=config.sampling.params,
                max_new_tokens=config.max_new_tokens,
                sequence=_sequence(dialogue.uid, len(dialogue.finish_reasons)),
            )
            number = engine.submit(request)
            asked[number], answers[number] = dialogue, []

    for dialogue in sorted(dialogues, key=_num_characters, reverse=True):  # neighbours have about the same length
        ask(dialogue)
    while engine.is_busy:
        for update in engine.step():
            answers[update.number] += update.tokens
            if update.finish_reason is not None:
                dialogue, tokens = asked.pop(update.number), answers.pop(update.number)
                dialogue.take(tokens, update.finish_reason == "stop", tokenizer, config.keep_truncated)
                ask(dialogue)
    usable = [dialogue for dialogue in dialogues if dialogue.uid not in refused]
    kept = [dialogue for dialogue in usable if dialogue.lack is None]
    summary = AnswerSummary(
        rows=len(rows),
        chats=len(kept),
        bad=len(bad),
        bad_rows=bad[:KEPT_BAD_ROWS],
        dropped=dict(Counter(dialogue.lack for dialogue in usable if dialogue.lack is not None)),
        shortened=dict(Counter(dialogue.cut for dialogue in kept if dialogue.cut is not None)),
        finish_reasons=dict(Counter(reason for dialogue in kept for reason in dialogue.finish_reasons)),
        tokens=sum(dialogue.num_tokens for dialogue in dialogues),
    )
    return [dialogue.row for dialogue in kept], summary


def _context(config: RegenerateConfig, target: Target) -> int:
    """Maximum tokens of a chat."""
    return min(config.max_length, target.spec.max_positions)


def _num_characters(dialogue: Dialogue) -> int:
    """Return the number of characters in the dialogue's next turn."""
    return sum(len(message["content"]) for message in dialogue.next_turn)


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Return every user turn with the messages since the last one, without answers."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
            if message["role"] == "user":
                turns.append([])
    return turns[:-1]


def _sequence(uid: str, turn: int) -> int:
    """Return the number that selects the noise of one answer, different for each."""
    return int.from_bytes(hashlib.sha256(f"{uid}#{turn}".encode()).digest()[:7], "big")
