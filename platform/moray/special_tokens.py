"""Special tokens that are spelt out in the contents of messages: text there, and nothing else.

Tokenizers take `<|im_end|>` for the end of a turn wherever it stands, so whoever writes it into a message could write
the turns of others. Contents are therefore marked before a template sees them, and cut out behind it. Where no content
spells a special token nothing is done at all. What the tokenizer does not call special, such as `<think>` often, and
plain words of a template, such as Vicuna's `USER:`, are left alone.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from moray.chat_template import Message
from moray.errors import DataError

_SPACE = re.compile(r"\s*")
_MARKS = range(0xE100, 0xF8FF)
"""Private-use characters: no template trims, tests or produces them."""


class SpecialTokens:
    """The special tokens of a tokenizer, and how to read texts that spell them."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast one of transformers."""
        added = tokenizer.added_tokens_decoder.items()
        self._special = {t.content: (number, t) for number, t in added if t.special and len(t.content) > 1}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tokenizer = tokenizer
        self._splitting: Any = None

    def are_spelt_in(self, messages: Sequence[Message]) -> bool:
        """Whether a content would be read as more than text."""
        return any(self._spelt.search(message["content"]) for message in messages)

    def mark(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """The messages with a mark behind every character of a special token that a content spells, and the mark.

        Raises:
            DataError: the contents use all characters that could be marks.
        """
        used = {character for message in messages for character in message["content"]}
        mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
        if mark is None:
            raise DataError("a chat spells special tokens and uses all private-use characters; leave some of them out")

        def marked(found: re.Match[str]) -> str:
            return "".join(character + mark for character in found.group())

        return [Message(role=m["role"], content=self._spelt.sub(marked, m["content"])) for m in messages], mark

    def tokenise(self, text: str, mark: str) -> tuple[list[int], np.ndarray]:
        """Ids of a rendering of marked messages, and their offsets [seq, 2] in it without the marks.

        What stands between the template's special tokens is tokenised piece by piece, as the tokenizer does by itself.

        Raises:
            UnicodeError, TypeError: the text holds a lone surrogate.
        """
        pieces: list[tuple[str, int | None]] = []
        end = 0
        for found in self._spelt.finditer(text):
            number, token = self._special[found.group()]
            start, stop = found.span()
            # Some tokens take in the white space beside them.
            start = end + len(text[end:start].rstrip()) if token.lstrip else start
            stop = _SPACE.match(text, stop).end() if token.rstrip else stop  # type: ignore[union-attr]
            pieces += [(text[end:start], None), (text[start:stop], number)]
            end = stop
        pieces.append((text[end:], None))
        plain = [(piece.replace(mark, ""), number) for piece, number in pieces]
        between = [piece for piece, number in plain if number is None]
        encoded = iter(self._backend().encode_batch(between, add_special_tokens=False))
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        begin = 0
        for piece, number in plain:
            if number is not None:
                ids.append(number)
                offsets.append((begin, begin + len(piece)))
            else:
                encoding = next(encoded)
                ids += encoding.ids
                offsets += [(begin + start, begin + stop) for start, stop in encoding.offsets]
            begin += len(piece)
        return ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)

    def _backend(self) -> Any:
        """A tokenizer of its own that reads special tokens as text: threads may use both at a time."""
        if self._splitting is None:
            from tokenizers import Tokenizer

            splitting = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            splitting.encode_special_tokens = True
            splitting.no_padding()
            splitting.no_truncation()
            self._splitting = splitting
        return self._splitting


def without_marks(text: str, mark: str, spans: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """A rendering and spans of its characters as they are without marks."""
    places = [found.start() for found in re.finditer(mark, text)]
    moved = [(start - bisect_left(places, start), end - bisect_left(places, end)) for start, end in spans]
    return text.replace(mark, ""), moved
