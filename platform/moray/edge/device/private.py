"""Keeps marked text on the device: the server sees a placeholder, and so do target and drafter.

    My code is <private>alpha seven</private>.    what the user writes
    My code is [P1].                              what is tokenised, and all that crosses
    ... your code [P1] ...                        what the target answers
    ... your code alpha seven ...                 what the user reads

The answer is the target's own for the redacted prompt: lossless for that prompt, not for the one that was written.
Hidden is the marked text, wherever it stands in the chat. Not hidden are everything else, the number of marked texts,
which of them are equal, and when what was sent. Text that the drafter writes alone in an answer (see
`edge.device.local_spans`) gets placeholders too.
"""

import re
from collections.abc import Sequence

from moray.chat_template import Message
from moray.errors import DataError

OPEN, CLOSE = "<private>", "</private>"
_MARKED = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)
_MIN_CHARACTERS = 3
"""Shorter texts stand in too many words to be replaced wherever they stand."""


class Redactor:
    """Placeholders for the marked texts of one chat."""

    def __init__(self) -> None:
        self._placeholders: dict[str, str] = {}
        """By marked text."""
        self._written: dict[str, str] = {}
        """Texts that the drafter wrote alone, by placeholder."""
        self._texts: list[str] = []
        """Messages of the chat that was redacted last; a placeholder must not stand in them already."""

    @property
    def is_used(self) -> bool:
        """Whether anything has been marked."""
        return bool(self._placeholders or self._written)

    @property
    def has_written(self) -> bool:
        """Whether the drafter wrote texts alone."""
        return bool(self._written)

    def add(self, text: str) -> str:
        """A new placeholder for a text that the drafter wrote alone."""
        placeholder = self._new_placeholder()
        self._written[placeholder] = text
        return placeholder

    def redact(self, messages: Sequence[Message]) -> list[Message]:
        """The chat with placeholders for what is marked in it, and for the same text where it is not marked.

        Raises:
            DataError: a mark is not closed, or what it encloses is too short.
        """
        self._texts = [message["content"] for message in messages]
        for message in messages:
            if message["role"] != "assistant":  # answers stand here as the server has them
                self._find(message["content"])
        return [
            {**message, "content": self._replaced(message["content"], has_marks=message["role"] != "assistant")}
            for message in messages
        ]

    def restore(self, text: str) -> str:
        """A text with the marked texts in place of their placeholders."""
        for placeholder, written in self._written.items():  # first: they may hold placeholders of the prompt
            text = text.replace(placeholder, written)
        for private, placeholder in self._placeholders.items():
            text = text.replace(placeholder, private)
        return text

    def stream(self) -> "StreamRestorer":
        """Restores an answer that comes in pieces."""
        return StreamRestorer(self)

    @property
    def longest(self) -> int:
        """Length of the longest placeholder."""
        return max((len(name) for name in (*self._placeholders.values(), *self._written)), default=0)

    def _find(self, text: str) -> None:
        rest = _MARKED.sub("", text)
        for mark in (OPEN, CLOSE):
            if mark in rest:
                raise DataError(f"a message holds '{mark}' without its other half: write {OPEN}...{CLOSE}")
        for private in _MARKED.findall(text):
            if len(private.strip()) < _MIN_CHARACTERS:
                raise DataError(
                    f"a private text has {len(private.strip())} characters; at least {_MIN_CHARACTERS} are needed, for "
                    "it is replaced wherever it stands"
                )
            if private not in self._placeholders:
                self._placeholders[private] = self._new_placeholder()

    def _new_placeholder(self) -> str:
        number = 1
        taken = {*self._placeholders.values(), *self._written}
        while (name := f"[P{number}]") in taken or any(name in text for text in self._texts):
            number += 1
        return name

    def _replaced(self, text: str, *, has_marks: bool) -> str:
        if has_marks:
            text = _MARKED.sub(lambda found: self._placeholders[found[1]], text)
        for private in sorted(self._placeholders, key=len, reverse=True):  # a text may hold another one
            text = text.replace(private, self._placeholders[private])
        return text


class StreamRestorer:
    """Restores placeholders in a text that comes in pieces; holds back what may be the beginning of one."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown after the next piece."""
        whole = self._held + text
        cut = len(whole)
        longest = self._redactor.longest
        begin = whole.rfind("[", max(0, len(whole) - longest + 1)) if longest else -1
        if begin >= 0 and "]" not in whole[begin:]:
            cut = begin
        self._held = whole[cut:]
        return self._redactor.restore(whole[:cut])

    def finish(self) -> str:
        """What is left at the end."""
        held, self._held = self._held, ""
        return self._redactor.restore(held)
