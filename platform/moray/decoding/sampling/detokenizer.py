"""The text of an answer as it is generated: certain text is released, text that may begin a stop string is held back.

The text released so far is always a prefix of the text of `StopStrings.text_before`, and equals it at the end.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moray.decoding.sampling.stop import SettledText, StopStrings, shown_length


class Piece(NamedTuple):
    """Text of consecutive tokens that were all drafted, or all not."""

    text: str
    is_drafted: bool
    """Its tokens were drafted and accepted."""


class IncrementalDetokenizer:
    """Follows one answer."""

    def __init__(
        self, stop: StopStrings, context: Sequence[int] = (), token_bytes: Callable[[int], bytes | None] | None = None
    ) -> None:
        """
        Args:
            stop: stop strings, if any, and how tokens are decoded.
            context: tokens before the answer, if its text continues theirs (see `SettledText`).
            token_bytes: a token's own bytes, None where they are unknown; for `offsets`.
        """
        self._strings = stop.strings
        self._settled = SettledText(stop.decode, context)
        self._held: list[Piece] = []
        self._is_drafted = False
        self._token_bytes = token_bytes
        self._begun = b""
        """Bytes of a character that is not complete yet."""
        self._begun_at = 0
        self.offsets: list[int] = []
        """Where each token of the last `push` begins, in characters of the answer's text. A token that continues a
        character begins where that character does."""

    def push(self, tokens: Sequence[int], num_accepted: int = 0) -> list[Piece]:
        """Add the next tokens, of which the first `num_accepted` were drafted; return the text that can be shown."""
        self.offsets = []
        for index, token in enumerate(tokens):
            self._is_drafted = index < num_accepted
            self.offsets.append(self._place(token))
            self._hold(self._settled.push(token))
        text = "".join(piece.text for piece in self._held)
        return self._let_out(len(text) - self._doubtful(text))

    def finish(self) -> list[Piece]:
        """The answer has ended: return the remaining text, up to a stop string if it ended with one."""
        self._hold(self._settled.unsettled)
        text = "".join(piece.text for piece in self._held)
        return self._let_out(shown_length(text, self._strings))

    def _place(self, token: int) -> int:
        """Where a token begins that has not been pushed yet."""
        settled = self._settled
        own = self._token_bytes(token) if self._token_bytes is not None else None
        if own is None:  # trailing U+FFFD may become one character with this token
            return settled.length + len(settled.unsettled.rstrip("\ufffd"))
        end = settled.length + len(settled.unsettled)
        if not own:
            return self._begun_at if self._begun else end
        goes_on = bool(self._begun) and _is_begun(self._begun + own[:1])
        offset = self._begun_at if goes_on else end
        text, self._begun = _split(self._begun + own if goes_on else own)
        self._begun_at = offset + len(text)
        return offset

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(Piece(text, self._is_drafted))

    def _doubtful(self, text: str) -> int:
        """Characters at the end of settled text that may begin a stop string, or are in or after a complete one."""
        found = [text.find(string) for string in self._strings if string in text]
        if found:
            return len(text) - min(found)
        most = max(map(len, self._strings), default=0) - 1
        for count in range(min(most, len(text)), 0, -1):
            if any(string.startswith(text[-count:]) for string in self._strings):
                return count
        return 0

    def _let_out(self, count: int) -> list[Piece]:
        out: list[Piece] = []
        while count > 0:
            piece = self._held.pop(0)
            if len(piece.text) > count:
                self._held.insert(0, piece._replace(text=piece.text[count:]))
                piece = piece._replace(text=piece.text[:count])
            count -= len(piece.text)
            if out and out[-1].is_drafted == piece.is_drafted:
                out[-1] = Piece(out[-1].text + piece.text, piece.is_drafted)
            else:
                out.append(piece)
        return out


def _split(data: bytes) -> tuple[str, bytes]:
    """Decoded text, and the bytes of an incomplete character after it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, decoder.getstate()[0]


def _is_begun(data: bytes) -> bool:
    """Whether the bytes are exactly one character, or the beginning of one."""
    text, begun = _split(data)
    return "\ufffd" not in text and len(text) + bool(begun) == 1
