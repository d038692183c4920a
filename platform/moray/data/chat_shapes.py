"""What a row of chats looks like: every accepted shape of a row, turned into messages.

Public sets of chats name the same things differently. This module refuses to know files and tokenizers.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from moray.text import Message

NO_ANSWER = "no assistant turn with text in it"
ACCEPTED = (
    "accepted are 'messages' or 'conversations' (lists of {role, content} or {from, value}), 'data' (texts of user "
    "and assistant in turn), 'instruction' (+ 'input') with 'output', and 'prompt' with 'completion' or 'response'"
)
_ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
}
_PAIRS = (("instruction", "output"), ("prompt", "completion"), ("prompt", "response"), ("instruction", "response"))
_IDS = ("prompt_id", "id", "conversation_id", "uuid", "uid", "_id")


class UnusableRowError(Exception):
    """Why a row is no chat; becomes a `BadRow`."""


def parse_row(line: bytes) -> dict[str, Any]:
    """One row of a JSON file; raises `UnusableRowError`."""
    try:
        row = json.loads(line.rstrip().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UnusableRowError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError as error:
        raise UnusableRowError(f"not UTF-8 text: byte {error.start + 1} of the row") from None
    except RecursionError:
        raise UnusableRowError("not valid JSON: nested too deeply") from None
    if not isinstance(row, dict):
        raise UnusableRowError(f"a row is a {type(row).__name__}; an object is needed")
    return row


def row_id(row: Mapping[str, Any]) -> str:
    """The row's own id, or nothing."""
    return next((str(row[key]) for key in _IDS if row.get(key) is not None), "")[:80]


def row_messages(row: Mapping[str, Any]) -> list[Message]:
    """The turns of a row of any accepted shape; raises `UnusableRowError`."""
    row = {key: value for key, value in row.items() if value is not None}  # tables have every column in every row
    turns = list(_turns(row))
    if isinstance(row.get("system"), str) and row["system"] and turns and turns[0]["role"] != "system":
        turns.insert(0, _message("system", row["system"], 0))
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns):
        raise UnusableRowError(NO_ANSWER)
    return turns


def _turns(row: Mapping[str, Any]) -> Iterable[Message]:
    for key in ("messages", "conversations", "data"):
        if key in row:
            if not isinstance(row[key], list):
                raise UnusableRowError(f"'{key}' is a {type(row[key]).__name__}; a list of turns is needed")
            if key == "data":
                roles = itertools.cycle(("user", "assistant"))
                return [_message(role, text, number) for number, (role, text) in enumerate(zip(roles, row[key]))]  # noqa: B905
            return [_read_turn(turn, number) for number, turn in enumerate(row[key])]
    for question, answer in _PAIRS:
        if question in row and answer in row:
            asked = row[question]
            if question == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
                asked = f"{asked}\n\n{row['input']}"
            return [_message("user", asked, 0), _message("assistant", row[answer], 1)]
    if "prompt" in row or "instruction" in row:
        raise UnusableRowError(NO_ANSWER)
    raise UnusableRowError(f"unknown shape with keys {', '.join(map(repr, row)) or 'none'}; {ACCEPTED}")


def _read_turn(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise UnusableRowError(
            f"turn {number} is a {type(turn).__name__}; {{role, content}} or {{from, value}} is needed"
        )
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise UnusableRowError(f"turn {number} has the role {name!r}; accepted are {', '.join(_ROLES)}")
    return _message(role, turn.get("content", turn.get("value")), number)


def _message(role: str, content: Any, number: int) -> Message:
    if not isinstance(content, str):
        raise UnusableRowError(f"turn {number} is a {type(content).__name__}; a text is needed")
    if not content.isascii() and any("\ud800" <= character <= "\udfff" for character in content):
        raise UnusableRowError(f"turn {number} holds half a surrogate pair, which is no text")
    return Message(role=role, content=content)
