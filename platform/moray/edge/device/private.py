"""Keeps marked text on the device: the server sees a placeholder, and so do target and drafter.

    My code is <private>alpha seven</private>.    what the user writes
    My code is [P1].                              what is tokenised, and all that crosses
    ... your code [P1] ...                        what the target answers
    ... your code alpha seven ...                 what the user reads

The answer is the target's own for the redacted prompt: lossless for that prompt, not for the one that was written.
Hidden is the marked text, wherever it stands in the chat. Not hidden are everything else, the number of marked texts,
which of them are equal, and when what was sent.
"""

import re
from collections.abc import Sequence

from moray.chat_template import Message
from moray.errors import DataError

_OPEN, _CLOSE = "<private>", "</private>"
_MARKED = re.compile(re.escape(_OPEN) + r"(.*?)" + re.escape(_CLOSE), re.DOTALL)
_MIN_CHARACTERS = 3
"""Shorter texts stand in too many words to be replaced wherever they stand."""


class Redactor:
    """Placeholders for the marked texts of one chat."""

    def __init__(self) -> None:
        self._placeholders: dict[str, str] = {}
        """By marked text."""

    @property
    def is_used(self) -> bool:
        """Whether anything has been marked."""
        return bool(self._placeholders)

    def redact(self, messages: Sequence[Message]) -> list[Message]:
        """The chat with placeholders for what is marked in it, and for the same text where it is not marked.

        Raises:
            DataError: a mark is not closed, or what it encloses is too short.
        """
        for message in messages:
            self._find(message["content"], [other["content"] for other in messages])
        return [{**message, "content": self._replaced(message["content"])} for message in messages]

    def restore(self, text: str) -> str:
        """A text with the marked texts in place of their placeholders."""
        for private, placeholder in self._placeholders.items():
            text = text.replace(placeholder, private)
        return text

    def stream(self) -> "StreamRestorer":
        """Restores an answer that comes in pieces."""
        return StreamRestorer(self, max((len(one) for one in self._placeholders.values()), default=0))

    def _find(self, text: str, texts: Sequence[str]) -> None:
        rest = _MARKED.sub("", text)
        for mark in (_OPEN, _CLOSE):
            if mark in rest:
                raise DataError(f"a message holds '{mark}' without its other half: write {_OPEN}...{_CLOSE}")
        for private in _MARKED.findall(text):
            if len(private.strip()) < _MIN_CHARACTERS:
                raise DataError(
                    f"a private text has {len(private.strip())} characters; at least {_MIN_CHARACTERS} are needed, for "
                    "it is replaced wherever it stands"
                )
            if private not in self._placeholders:
                self._placeholders[private] = self._new_placeholder(texts)

    def _new_placeholder(self, texts: Sequence[str]) -> str:
        number = 1
        taken = set(self._placeholders.values())
        while (name := f"[P{number}]") in taken or any(name in text for text in texts):
            number += 1
        return name

    def _replaced(self, text: str) -> str:
        text = _MARKED.sub(lambda found: self._placeholders[found[1]], text)
        for private in sorted(self._placeholders, key=len, reverse=True):  # a text may hold another one
            text = text.replace(private, self._placeholders[private])
        return text


class StreamRestorer:
    """Restores placeholders in a text that comes in pieces; holds back what may be the beginning of one."""

    def __init__(self, redactor: Redactor, longest: int) -> None:
        """`longest` is the length of the longest placeholder."""
        self._redactor = redactor
        self._longest = longest
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown after the next piece."""
        whole = self._held + text
        cut = len(whole)
        begin = whole.rfind("[", max(0, len(whole) - self._longest + 1)) if self._longest else -1
        if begin >= 0 and "]" not in whole[begin:]:
            cut = begin
        self._held = whole[cut:]
        return self._redactor.restore(whole[:cut])

    def finish(self) -> str:
        """What is left at the end."""
        held, self._held = self._held, ""
        return self._redactor.restore(held)
