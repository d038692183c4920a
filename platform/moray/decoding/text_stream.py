"""The text of an answer while it comes: what is certain is let out, what may begin a stop string is held back.

All that was let out is the beginning of `StopStrings.text_before`'s text, and with the end it is that text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moray.decoding.stop import SettledText, StopStrings, shown_length


class Piece(NamedTuple):
    """Text of neighbouring tokens that came in the same way."""

    text: str
    is_drafted: bool
    """Its tokens were drafted and accepted."""


class TextStream:
    """Follows one answer."""

    def __init__(self, stop: StopStrings) -> None:
        """`stop` also says how tokens are decoded; it need not hold any string."""
        self._strings = stop.strings
        self._settled = SettledText(stop.decode)
        self._held: list[Piece] = []
        self._is_drafted = False

    def push(self, tokens: Sequence[int], num_accepted: int = 0) -> list[Piece]:
        """The next tokens, of which the first `num_accepted` were drafted; returns what may be shown."""
        for index, token in enumerate(tokens):
            self._is_drafted = index < num_accepted
            self._hold(self._settled.push(token))
        text = "".join(piece.text for piece in self._held)
        return self._let_out(len(text) - self._doubtful(text))

    def finish(self) -> list[Piece]:
        """The answer has ended: the rest, up to a stop string if it ended with one."""
        self._hold(self._settled.unsettled)
        text = "".join(piece.text for piece in self._held)
        return self._let_out(shown_length(text, self._strings))

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(Piece(text, self._is_drafted))

    def _doubtful(self, text: str) -> int:
        """Characters at the end of settled text that a stop string may have begun with, or holds already."""
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
